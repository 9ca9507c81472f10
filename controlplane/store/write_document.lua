-- Writes a document of the control plane by compare-and-set on its revision.
--
-- KEYS: 1 the hash of rollouts, 2 the desired document. ARGV: 1 name of the rollout, or empty for the desired document,
-- 2 the value, 3 the highest revision that it may replace, 4 most rollouts in the hash.
-- Beyond that number the rollouts with the lowest names are removed. Returns {1, ''}, or {0, the value in force}.
local is_desired = ARGV[1] == ''
local at, wanted = is_desired and KEYS[2] or KEYS[1], is_desired and 'string' or 'hash'
local kind = redis.call('TYPE', at).ok
if kind ~= wanted and kind ~= 'none' then redis.call('DEL', at) end
local present = is_desired and redis.call('GET', at) or not is_desired and redis.call('HGET', at, ARGV[1])
if present then
  local revision = tonumber(string.match(present, '^{"revision":(%d+),') or '0')
  if revision > tonumber(ARGV[3]) then return {0, present} end
end
if is_desired then
  redis.call('SET', at, ARGV[2])
  return {1, ''}
end
redis.call('HSET', at, ARGV[1], ARGV[2])
local surplus = redis.call('HLEN', at) - tonumber(ARGV[4])
if surplus > 0 then
  local names = redis.call('HKEYS', at)
  table.sort(names)
  for each = 1, surplus do redis.call('HDEL', at, names[each]) end
end
return {1, ''}
