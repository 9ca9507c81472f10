"""The part of the script that reads what is known of an account, changes it in memory, and writes it: see script.

Pure: text alone.
"""

from __future__ import annotations

from typing import Final

READ: Final = """
redis.replicate_commands()
local UNIT, LIFE_MS, TOUCH_MS, SETTLED_MS, SWEPT_MS = 60000, 90000000, 3600000, 300000, 3600000
local TOMBSTONES_MAX, SWEEP_MAX, BUNCH_MS = 50000, 100, 256
local CLAIM_SHARE, CLAIM_LATE, CLAIM_LATE_MS = 0.5, 0.5, 500
local LEVELS, OPEN, LEASES = KEYS[1], KEYS[2], KEYS[3]
local call, floor, max, min, huge, sub = redis.call, math.floor, math.max, math.min, math.huge, string.sub
local pack, read = struct.pack, struct.unpack
local limits, now = ARGV[2], read('<d', ARGV[1])
local count = #limits / 48
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end

-- What is known, and becomes of it: the ledger by these places, the scopes, and by rid `rows` and `ends` (false: gone).
local RESERVED, EXTENDED, SETTLED, REFUNDED, SWEPT, OVERRUN, SPENT = 1, 2, 3, 4, 5, 6, 7
local SWEEPS, REOPENED, RECREATED, LIVE, ROWS, TOUCHED, EPOCH = 8, 9, 10, 11, 12, 13, 14
local BOOK = '<ddddddddddddd'
local BOOK_SIZE = 104
local scopes, elsewhere, rows, ends, texts = {}, nil, {}, {}, {}
local must_touch, must_book, must_level = false, false, false

-- How many reservations an operation names.
local function named(operation, numbers)
  if operation == 'renew' then return (#numbers - 8) / 40 end
  return (operation == 'show' or operation == 'sweep') and 0 or 1
end

local within = table.concat(ARGV, '\\n', 3, 2 + count)
local asked, at = {'+'}, 3 + count
for i = 1, count do asked[1 + i], asked[1 + count + i] = '#' .. ARGV[2 + i], '#~' .. ARGV[2 + i] end
while at <= #ARGV do
  local names = named(ARGV[at], ARGV[at + 1])
  for i = 1, names do asked[#asked + 1] = ARGV[at + 1 + i] end
  at = at + 2 + names
end
local known = call('HMGET', OPEN, unpack(asked))
local book = known[1] and {read(BOOK, known[1])} or {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
if call('ZCARD', LEASES) ~= book[ROWS] then
  call('UNLINK', OPEN, LEASES)
  known, book = {}, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
end
local rows_before = book[ROWS]
-- A release that does not count overruns writes the ledger without their epoch. Then all counts begin anew, with renewals.
local has_epoch = known[1] and #known[1] > BOOK_SIZE
local epoch = has_epoch and read('<d', known[1], BOOK_SIZE + 1) or now
for i = 2 + 2 * count, #asked do texts[asked[i]] = known[i] or false end

-- The open overrun that a scope's field tells, and how much of it slabs hold free.
local function counted(text)
  if not text then return 0, 0 end
  local tokens, since, free = read('<ddd', text)
  if since ~= epoch then return 0, 0 end
  return tokens, free
end

local function told_overrun(tokens, free)
  return pack('<ddd', max(0, tokens), epoch, max(0, free))
end

local levels = count > 0 and call('HMGET', LEVELS, unpack(ARGV, 3, 2 + count))
for i = 1, count do
  local request_rate, request_burst, token_rate, token_burst, slots_max, overrun_max =
    read('<dddddd', limits, 48 * i - 47)
  local requests, tokens = request_burst, token_burst
  local claim, claim_from, claim_to = 0, 0, 0
  if levels[i] then
    if #levels[i] > 24 then
      claim, claim_from, claim_to = read('<ddd', levels[i], 25)
      if now < claim_from or token_burst == huge then claim, claim_from, claim_to = 0, 0, 0 end
    end
    local requests_then, tokens_then, ms = read('<ddd', levels[i])
    local past = now - ms
    if past < 0 then
      past, must_level = 0, true
    end
    if requests < huge then requests = min(requests, requests_then + past * request_rate) end
    if tokens < huge then tokens = min(tokens, tokens_then + past * token_rate) end
  else
    must_touch = true
  end
  local overrun, overrun_free = counted(known[1 + count + i])
  scopes[i] = {
    request_rate = request_rate, request_burst = request_burst, requests = requests,
    token_rate = token_rate, token_burst = token_burst, tokens = tokens,
    claim = now < claim_to and claim or 0, claim_from = claim_from, claim_to = claim_to,
    slots_max = slots_max, slots = tonumber(known[1 + i]) or 0,
    overrun_max = overrun_max, overrun = overrun, overrun_before = overrun,
    overrun_free = overrun_free, overrun_free_before = overrun_free,
  }
end

local function add(place, by)
  if by ~= 0 then
    book[place] = book[place] + by
    must_book = true
  end
end

local function parsed(text)
  if not text then return nil end
  local state = sub(text, 1, 1)
  if state == 's' then return {state = 's'} end
  local tokens, requests, slots, used, used_requests, drawn = read('<dddddd', text, 2)
  local overrun, overrun_free, to = 0, 0, -1
  if sub(text, -26, -25) == '\\n~' then
    local open, since, free = read('<ddd', text, #text - 23)
    if since == epoch then overrun, overrun_free = open, free end
    to = -27
  end
  return {
    state = state, tokens = tokens, requests = requests, slots = slots, used = used, used_requests = used_requests,
    drawn = drawn, within = sub(text, 50, to), overrun = overrun, overrun_free = overrun_free,
  }
end

local function find(rid)
  if rows[rid] ~= nil then return parsed(rows[rid]) end
  return parsed(texts[rid])
end
"""

WRITE: Final = """
local function put(rid, row, ms)
  rows[rid] = row.state == 's' and 's' or row.state
    .. pack('<dddddd', row.tokens, row.requests, row.slots, row.used, row.used_requests, row.drawn) .. row.within
    .. (row.overrun > 0 and '\\n~' .. pack('<ddd', row.overrun, epoch, row.overrun_free) or '')
  ends[rid] = ms
end

-- Adds to what the scopes of `row` count: 'slots', 'overrun' or 'overrun_free'.
local function tally(row, what, by)
  if by == 0 then return end
  if row.within == within then
    for i = 1, count do scopes[i][what] = scopes[i][what] + by end
  else
    for name in string.gmatch(row.within, '[^\\n]+') do
      local place = nil
      for i = 1, count do place = ARGV[2 + i] == name and i or place end
      if place then
        scopes[place][what] = scopes[place][what] + by
      else
        elsewhere = elsewhere or {slots = {}, overrun = {}, overrun_free = {}}
        elsewhere[what][name] = (elsewhere[what][name] or 0) + by
      end
    end
  end
end

local function hold(row, slots)
  tally(row, 'slots', slots)
end

-- Sets the open overrun of `row`; `free`: what no request of it was promised.
local function open(row, overrun, free)
  free = free or 0
  tally(row, 'overrun', overrun - row.overrun)
  tally(row, 'overrun_free', free - row.overrun_free)
  must_book = must_book or overrun ~= row.overrun and not has_epoch
  row.overrun, row.overrun_free = overrun, free
end

local function new_row(tokens, requests, slots)
  add(ROWS, 1)
  add(LIVE, 1)
  local row = {
    state = 'o', tokens = tokens, requests = requests, slots = slots, used = 0, used_requests = 0, drawn = 0,
    within = within, overrun = 0, overrun_free = 0,
  }
  hold(row, slots)
  return row
end

-- Remembers a reservation that is over; one more than TOMBSTONES_MAX are forgotten at once. What may be forgotten is due in
-- bunches, so that few sweeps find something.
local function bury(rid, row, is_new)
  if book[ROWS] - book[LIVE] - (is_new and 0 or 1) < TOMBSTONES_MAX then
    if is_new then add(ROWS, 1) end
    local ms = now + (row.state == 's' and SETTLED_MS or SWEPT_MS)
    put(rid, row, ms + BUNCH_MS - ms % BUNCH_MS)
  elseif not is_new then
    add(ROWS, -1)
    rows[rid] = false
  end
end

local function sweep(most)
  local due = call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, most)
  local swept, tokens = 0, 0
  if #due > 0 then
    local found = call('HMGET', OPEN, unpack(due))
    for i, rid in ipairs(due) do
      if rows[rid] == nil or rows[rid] and ends[rid] <= now then  -- else an operation before this one has dealt with it
        local row = parsed(rows[rid] or found[i])
        if row and row.state == 'o' then
          swept, tokens = swept + 1, tokens + row.tokens
          add(LIVE, -1)
          hold(row, -row.slots)
          open(row, 0)
          row.state = 'w'
          bury(rid, row)
        else
          add(ROWS, -1)
          rows[rid] = false
        end
      end
    end
    add(SWEPT, tokens)
    add(SWEEPS, swept)
  end
  return swept, tokens, #due
end

local function reopen(row)
  row.state = 'o'
  add(LIVE, 1)
  hold(row, row.slots)
  add(SWEPT, -row.tokens)
  add(REOPENED, 1)
end

-- Takes from the levels of the scopes that `row` counts in, or gives back what is below 0. `is_floored`: not below 0.
local function take(row, tokens, requests, is_floored)
  tokens, requests = tokens * UNIT, requests * UNIT
  for i = 1, count do
    local scope = scopes[i]
    if row.within == within or string.find('\\n' .. row.within .. '\\n', '\\n' .. ARGV[2 + i] .. '\\n', 1, true) then
      local level = min(scope.token_burst, scope.tokens - tokens)
      scope.tokens = is_floored and max(level, min(scope.tokens, 0)) or level
      level = min(scope.request_burst, scope.requests - requests)
      scope.requests = is_floored and max(level, min(scope.requests, 0)) or level
    end
  end
end

local function least()
  local requests, tokens, slots = huge, huge, huge
  for i = 1, count do
    local scope = scopes[i]
    requests, tokens = min(requests, scope.requests), min(tokens, scope.tokens)
    slots = min(slots, scope.slots_max - scope.slots)
  end
  return requests, tokens, slots
end

local function shown(level)
  return level < huge and floor(level) or ''
end

local function remaining()
  local requests, tokens, slots = least()
  return shown(requests), shown(tokens), shown(slots)
end

-- Writes what has changed in scopes that the call does not name.
local function keep_elsewhere()
  for name, by in pairs(elsewhere.slots) do
    if by ~= 0 then call('HINCRBY', OPEN, '#' .. name, by) end
  end
  for name, by in pairs(elsewhere.overrun) do
    local free_by = elsewhere.overrun_free[name] or 0
    if by ~= 0 or free_by ~= 0 then
      local tokens, free = counted(call('HGET', OPEN, '#~' .. name))
      call('HSET', OPEN, '#~' .. name, told_overrun(tokens + by, free + free_by))
    end
  end
end

-- Writes what has changed. What may fail comes first: nothing is written then.
local function keep()
  if elsewhere then keep_elsewhere() end
  if rows_before == 0 or math.abs(now - book[TOUCHED]) > TOUCH_MS then must_touch = true end
  if must_touch then add(TOUCHED, now - book[TOUCHED]) end
  if count > 0 and must_level then
    local fields = {}
    for i = 1, count do
      fields[2 * i - 1] = ARGV[2 + i]
      local scope = scopes[i]
      fields[2 * i] = pack('<ddd', scope.requests, scope.tokens, now)
      if now < 2 * scope.claim_to - scope.claim_from then
        fields[2 * i] = fields[2 * i] .. pack('<ddd', scope.claim, scope.claim_from, scope.claim_to)
      end
    end
    call('HSET', LEVELS, unpack(fields))
  end
  local fields, gone, leases, n = {}, nil, {}, 0
  for rid, text in pairs(rows) do
    if text then
      fields[n + 1], fields[n + 2] = rid, text
      leases[n + 1], leases[n + 2] = ends[rid], rid
      n = n + 2
    else
      gone = gone or {}
      gone[#gone + 1] = rid
    end
  end
  if n > 0 then call('ZADD', LEASES, unpack(leases)) end
  if must_book then
    book[EPOCH] = epoch
    fields[n + 1], fields[n + 2] = '+', pack(BOOK .. 'd', unpack(book, 1, EPOCH))
    n = n + 2
  end
  for i = 1, count do
    local scope = scopes[i]
    if scope.slots ~= (tonumber(known[1 + i]) or 0) then
      fields[n + 1], fields[n + 2] = asked[1 + i], scope.slots
      n = n + 2
    end
    if scope.overrun ~= scope.overrun_before or scope.overrun_free ~= scope.overrun_free_before then
      fields[n + 1], fields[n + 2] = asked[1 + count + i], told_overrun(scope.overrun, scope.overrun_free)
      n = n + 2
    end
  end
  if n > 0 then call('HSET', OPEN, unpack(fields)) end
  if gone then
    call('HDEL', OPEN, unpack(gone))
    call('ZREM', LEASES, unpack(gone))
  end
  if must_touch then
    for i = 1, 3 do call('PEXPIRE', KEYS[i], LIFE_MS) end
  end
end
"""
