-- Writes the override of one scope where the hash has none or an older one, and announces it.
--
-- An entry that cannot be read stays: it is of another release.
--
-- KEYS: 1 the hash of overrides. ARGV: 1 scope, 2 entry as JSON, 3 channel, 4 the entry's version. Returns 1 if the entry
-- was written, else 0.
local found = redis.call('HGET', KEYS[1], ARGV[1])
if found then
  local ok, entry = pcall(cjson.decode, found)
  if not ok or type(entry) ~= 'table' or type(entry.version) ~= 'number' then return 0 end
  if entry.version >= tonumber(ARGV[4]) then return 0 end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
