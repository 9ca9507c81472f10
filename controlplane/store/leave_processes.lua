-- Removes the entry of a control process if it is the caller's own.
--
-- KEYS: 1 the hash of entries. ARGV: 1 process id, 2 boot id. Returns 1 if it was removed.
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return 0 end
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.find(entry, '"boot_id":"' .. ARGV[2] .. '"', 1, true) then
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
