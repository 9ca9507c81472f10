-- Reads the leases of the control processes with the time of this Redis.
--
-- KEYS: 1 the hash of leases. ARGV: 1 the most leases. Returns {now in ms, lease, lease, ...}.
local time = redis.call('TIME')
local found = {string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))}
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return found end
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[1]) then return found end
for _, lease in ipairs(redis.call('HVALS', KEYS[1])) do found[#found + 1] = lease end
return found
