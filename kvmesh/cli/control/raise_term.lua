-- Raises the number of the highest term. A higher number stays.
--
-- KEYS: 1 the number. ARGV: 1 the number to store. Returns the number in force.
local found = tonumber(redis.call('GET', KEYS[1]) or '') or 0
if found >= tonumber(ARGV[1]) then return string.format('%.0f', found) end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
