-- Deletes the lease of a process's name, and announces that, unless the lease is another process's.
--
-- KEYS: 1 the lease, 2 the set of names. ARGV: 1 boot id of the process, 2 name, 3 channel, 4 message. Returns 0.
local lease = redis.call('GET', KEYS[1])
if lease and string.find(lease, ARGV[1], 1, true) then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
  redis.call('PUBLISH', ARGV[3], ARGV[4])
end
return 0
