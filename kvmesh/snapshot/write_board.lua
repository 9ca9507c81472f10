-- Writes a snapshot to the board unless the board has the same or a higher one.
--
-- Orders are ASCII texts of digits, lower-case letters and ".". They are compared byte by byte, because Lua's own
-- comparison follows the locale of the server. A board that has no such order is overwritten.
--
-- KEYS: 1 the board, a hash. ARGV: 1 order of the snapshot, 2 its bytes.
-- Returns 1: written, 0: the board has the same order, -1: the board has a higher one.
local function compare(a, b)
  for at = 1, math.min(#a, #b) do
    local difference = string.byte(a, at) - string.byte(b, at)
    if difference ~= 0 then return difference end
  end
  return #a - #b
end

if redis.call('TYPE', KEYS[1]).ok == 'hash' then
  local found = redis.call('HGET', KEYS[1], 'order') or ''
  if string.match(found, '^%d+%.%x+%.%d+$') and redis.call('HSTRLEN', KEYS[1], 'data') > 0 then
    local difference = compare(found, ARGV[1])
    if difference == 0 then return 0 end
    if difference > 0 then return -1 end
  end
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'order', ARGV[1], 'data', ARGV[2])
return 1
