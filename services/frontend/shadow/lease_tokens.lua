-- Grants tokens of a shadow's ceiling to one frontend, and takes unused ones back.
--
-- KEYS: 1 the ledger, a hash: taken, minute, minute_taken. ARGV: 1 least tokens, 0 to give back alone, 2 most tokens,
-- 3 the ceiling, 4 the ceiling of a minute or 0, 5 tokens given back, 6 life of the ledger in ms.
-- The minute counts grants alone: tokens that are given back do not come back to it.
-- Returns {granted, taken in all, 1 if the ceiling of the minute refused}.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
local minute = math.floor(tonumber(redis.call('TIME')[1]) / 60)
local row = redis.call('HMGET', KEYS[1], 'taken', 'minute', 'minute_taken')
local taken = math.max(0, (tonumber(row[1] or '') or 0) - tonumber(ARGV[5]))
local in_minute = tonumber(row[2] or '') == minute and tonumber(row[3] or '') or 0
local least, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local left, refused_by_minute = tonumber(ARGV[3]) - taken, 0
local granted = math.min(most, left)
if granted >= least and tonumber(ARGV[4]) > 0 and tonumber(ARGV[4]) - in_minute < granted then
  granted = tonumber(ARGV[4]) - in_minute
  if granted < least then refused_by_minute = 1 end
end
if granted < least or granted < 0 then granted = 0 end
taken, in_minute = taken + granted, in_minute + granted
redis.call('HSET', KEYS[1], 'taken', string.format('%.0f', taken), 'minute', minute, 'minute_taken', string.format('%.0f', in_minute))
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return {granted, taken, refused_by_minute}
