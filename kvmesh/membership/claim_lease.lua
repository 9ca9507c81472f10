-- Writes the lease of a process's name by compare-and-set, and returns the previous lease.
--
-- The lease is written if there is no lease, or if the present lease is the process's own. It is also written over the
-- one lease that may be replaced. A new lease is announced. So the other processes find this process at once, for example
-- after a freeze.
--
-- KEYS: 1 the lease, 2 the set of names.
--
-- ARGV: 1 the new lease (empty: read only), 2 its life in ms, 3 name, 4 channel, 5 "announce" or empty, 6 boot id,
-- 7 a lease of another process that may be replaced, or empty.
--
-- Returns 1 if the lease was written, otherwise 0; the previous lease; the life of that lease in ms.
local lease, left_ms = redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])
local own = lease and string.find(lease, ARGV[6], 1, true)
if ARGV[1] == '' or lease and not own and lease ~= ARGV[7] then
  return {0, lease, left_ms}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[3])
if not own or ARGV[5] ~= '' then
  redis.call('PUBLISH', ARGV[4], ARGV[3])
end
return {1, lease, left_ms}
