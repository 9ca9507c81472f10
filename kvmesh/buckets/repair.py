"""A script that removes from a budget's keys what another program wrote there, and keeps all that can be read.

Pure: text alone. A key of another type is removed. Of the others a field goes that the budget's script could not read.
The counts of slots and of open overrun are sums over reservations, so they are added up anew. A reservation that is removed
counts as swept: its estimate stays charged. Levels, and so debts, stay as they are.

KEYS as in script. ARGV: now in ms, as in script.
"""

from __future__ import annotations

from typing import Final

MEND: Final = """
redis.replicate_commands()
local RESERVED, EXTENDED, SETTLED, REFUNDED, SWEPT = 1, 2, 3, 4, 5
local SWEEPS, LIVE, ROWS, TOUCHED = 8, 11, 12, 13
local BOOK, BOOK_SIZE, LEASE_MS = '<ddddddddddddd', 104, 15000
local LEVELS, OPEN, LEASES = KEYS[1], KEYS[2], KEYS[3]
local call, sub, pack, read = redis.call, string.sub, struct.pack, struct.unpack
local now = read('<d', ARGV[1])
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

for i, kind in ipairs({'hash', 'hash', 'zset'}) do
  local found = call('TYPE', KEYS[i]).ok
  if found ~= 'none' and found ~= kind then call('UNLINK', KEYS[i]) end
end

local words = call('HGETALL', LEVELS)
for i = 1, #words, 2 do
  local size = #words[i + 1]
  if size ~= 24 and size ~= 48 then call('HDEL', LEVELS, words[i]) end
end

local leased, without_row = {}, {}
for _, rid in ipairs(call('ZRANGE', LEASES, 0, -1)) do leased[rid], without_row[rid] = true, true end

local book, epoch, rows, live, held = nil, nil, 0, 0, 0
local slots, overruns = {}, {}  -- by scope; by epoch and scope: open, and free of it

local function count(text)
  local tokens, _, slots_held = read('<ddd', text, 2)
  local within, overrun, since, free = sub(text, 50), 0, nil, 0
  if sub(text, -26, -25) == '\\n~' then
    within = sub(text, 50, -27)
    overrun, since, free = read('<ddd', text, #text - 23)
    overruns[since] = overruns[since] or {}
  end
  live, held = live + 1, held + tokens
  for name in string.gmatch(within, '[^\\n]+') do
    slots[name] = (slots[name] or 0) + slots_held
    if since then
      local sum = overruns[since][name] or {0, 0}
      overruns[since][name] = {sum[1] + overrun, sum[2] + free}
    end
  end
end

words = call('HGETALL', OPEN)
for i = 1, #words, 2 do
  local name, text = words[i], words[i + 1]
  local mark, state = sub(name, 1, 1), sub(text, 1, 1)
  if name == '+' and (#text == BOOK_SIZE or #text == BOOK_SIZE + 8) then
    book = {read(BOOK, text)}
    epoch = #text > BOOK_SIZE and read('<d', text, BOOK_SIZE + 1) or nil
  elseif mark == '#' then
    call('HDEL', OPEN, name)
  elseif name ~= '+' and (text == 's' or ((state == 'o' or state == 'w') and #text >= 49)) then
    rows, without_row[name] = rows + 1, nil
    if state == 'o' then count(text) end
    if not leased[name] then call('ZADD', LEASES, state == 'o' and now + LEASE_MS or now, name) end
  else
    call('HDEL', OPEN, name)
  end
end
for rid in pairs(without_row) do call('ZREM', LEASES, rid) end
if rows == 0 and not book then return 0 end

if not book then
  book = {held, 0, 0, 0, 0, 0, 0, 0, 0, 0, live, 0, 0}
  for since in pairs(overruns) do epoch = math.max(epoch or since, since) end
end
local lost = book[RESERVED] + book[EXTENDED] - book[SETTLED] - book[REFUNDED] - book[SWEPT] - held
book[SWEPT], book[SWEEPS] = book[SWEPT] + lost, book[SWEEPS] + book[LIVE] - live
book[LIVE], book[ROWS], book[TOUCHED] = live, rows, 0
call('HSET', OPEN, '+', pack(BOOK, unpack(book, 1, TOUCHED)) .. (epoch and pack('<d', epoch) or ''))
for name, number in pairs(slots) do call('HSET', OPEN, '#' .. name, number) end
for name, sum in pairs(epoch and overruns[epoch] or {}) do
  call('HSET', OPEN, '#~' .. name, pack('<ddd', sum[1], epoch, sum[2]))
end
return rows
"""
