-- Deletes the leader's lease if it is the caller's own.
--
-- KEYS: 1 the lease. ARGV: 1 process id, 2 boot id. Returns 1 if it was deleted.
if redis.call('TYPE', KEYS[1]).ok ~= 'string' then return 0 end
local is_json, holder = pcall(cjson.decode, redis.call('GET', KEYS[1]))
if is_json and type(holder) == 'table' and holder.process_id == ARGV[1] and holder.boot_id == ARGV[2] then
  return redis.call('DEL', KEYS[1])
end
return 0
