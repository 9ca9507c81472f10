-- Removes an unreadable board, unless it has changed since it was read.
--
-- KEYS: 1 the board. ARGV: 1 the order that was read, 2 the size of the data that was read. Returns 1 if it was removed.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'hash' then
  local order = redis.call('HGET', KEYS[1], 'order') or ''
  local is_same = order == ARGV[1] or ARGV[1] == ''
  if not is_same or redis.call('HSTRLEN', KEYS[1], 'data') ~= tonumber(ARGV[2]) then return 0 end
end
return redis.call('DEL', KEYS[1])
