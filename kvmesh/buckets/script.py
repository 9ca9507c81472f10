"""The budget of one organisation as a script that Redis runs: operations of one account, each atomic, one after the other.

Commands of Redis 6.2 alone; on a Cluster too. KEYS, of one hash tag:
1 levels  hash  scope -> request level, token level, ms: how full the two buckets were at that time; inf: not limited;
          then, if there is a claim, its tokens, and from when to when in ms
2 open    hash  rid -> a reservation, or what is remembered of it; "#<scope>" -> slots held; "+" -> the ledger
3 leases  sorted set  rid -> when its lease ends, or when it may be forgotten, in ms

A level counts in sixty-thousandths: what a rate of 1 per minute adds in 1 ms. So all sums are exact. Levels are at most the
burst; below 0 they are debt. A reservation is a letter, o: open, w: swept; tokens, requests, slots, used tokens, used
requests, number; then its scopes, one a line. "s" alone: settled.

A claim keeps a large request from starving beside small ones. Who needs more than half of a burst and is refused for want
of tokens leaves one, not on an organisation: one tenant must not hold up another. While it stands, whoever needs less is
refused, and slabs get nothing more. It ends when somebody is admitted who needs as much, or when the one who left it
should have come back; then there is no other for as long as it stood: small ones have half of the time.

ARGV: now in ms (0: the server's own clock; anything else is for tests); per scope requests per minute, their burst in
sixty-thousandths, tokens per minute, their burst likewise, slots, where a burst or a number of slots of inf means not
limited; the names of the scopes; then per operation its name, what it takes (see wire), and names of reservations. Numbers
are doubles, little-endian: to read and write text costs more than all sums. Answers are in the order of the operations.

Slots, reservations and ledger live in one hash so that they are lost together; leases that do not fit it empty it. Reads
come first and writes last, each of them one command, whatever the number of operations: most of the cost is commands.
"""

from __future__ import annotations

from typing import Final

_READ: Final = """
redis.replicate_commands()
local UNIT, LIFE_MS, TOUCH_MS, SETTLED_MS, SWEPT_MS = 60000, 90000000, 3600000, 300000, 3600000
local TOMBSTONES_MAX, SWEEP_MAX, BUNCH_MS = 50000, 100, 256
local CLAIM_SHARE, CLAIM_LATE, CLAIM_LATE_MS = 0.5, 0.5, 500
local LEVELS, OPEN, LEASES = KEYS[1], KEYS[2], KEYS[3]
local call, floor, max, min, huge, sub = redis.call, math.floor, math.max, math.min, math.huge, string.sub
local pack, read = struct.pack, struct.unpack
local limits, now = ARGV[2], read('<d', ARGV[1])
local count = #limits / 40
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end

-- What is known, and becomes of it: the ledger by these places, the scopes, and by rid `rows` and `ends` (false: gone).
local RESERVED, EXTENDED, SETTLED, REFUNDED, SWEPT, OVERRUN, SPENT = 1, 2, 3, 4, 5, 6, 7
local SWEEPS, REOPENED, RECREATED, LIVE, ROWS, TOUCHED = 8, 9, 10, 11, 12, 13
local BOOK = '<ddddddddddddd'
local scopes, elsewhere, rows, ends, texts = {}, nil, {}, {}, {}
local must_touch, must_book, must_level = false, false, false

-- How many reservations an operation names.
local function named(operation, numbers)
  if operation == 'renew' then return (#numbers - 8) / 32 end
  return (operation == 'show' or operation == 'sweep') and 0 or 1
end

local within = table.concat(ARGV, '\\n', 3, 2 + count)
local asked, at = {'+'}, 3 + count
for i = 1, count do asked[1 + i] = '#' .. ARGV[2 + i] end
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
for i = 2 + count, #asked do texts[asked[i]] = known[i] or false end

local levels = count > 0 and call('HMGET', LEVELS, unpack(ARGV, 3, 2 + count))
for i = 1, count do
  local request_rate, request_burst, token_rate, token_burst, slots_max = read('<ddddd', limits, 40 * i - 39)
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
  scopes[i] = {
    request_rate = request_rate, request_burst = request_burst, requests = requests,
    token_rate = token_rate, token_burst = token_burst, tokens = tokens,
    claim = now < claim_to and claim or 0, claim_from = claim_from, claim_to = claim_to,
    slots_max = slots_max, slots = tonumber(known[1 + i]) or 0,
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
  return {
    state = state, tokens = tokens, requests = requests, slots = slots, used = used, used_requests = used_requests,
    drawn = drawn, within = sub(text, 50),
  }
end

local function find(rid)
  if rows[rid] ~= nil then return parsed(rows[rid]) end
  return parsed(texts[rid])
end
"""

_WRITE: Final = """
local function put(rid, row, ms)
  rows[rid] = row.state == 's' and 's' or row.state
    .. pack('<dddddd', row.tokens, row.requests, row.slots, row.used, row.used_requests, row.drawn) .. row.within
  ends[rid] = ms
end

local function hold(row, slots)
  if slots == 0 then return end
  if row.within == within then
    for i = 1, count do scopes[i].slots = scopes[i].slots + slots end
  else
    for name in string.gmatch(row.within, '[^\\n]+') do
      local place = nil
      for i = 1, count do place = ARGV[2 + i] == name and i or place end
      if place then
        scopes[place].slots = scopes[place].slots + slots
      else
        elsewhere = elsewhere or {}
        elsewhere[name] = (elsewhere[name] or 0) + slots
      end
    end
  end
end

local function new_row(tokens, requests, slots)
  add(ROWS, 1)
  add(LIVE, 1)
  local row = {
    state = 'o', tokens = tokens, requests = requests, slots = slots, used = 0, used_requests = 0, drawn = 0,
    within = within,
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
      if rows[rid] == nil then  -- else an operation before this one has dealt with it
        local row = parsed(found[i])
        if row and row.state == 'o' then
          swept, tokens = swept + 1, tokens + row.tokens
          add(LIVE, -1)
          hold(row, -row.slots)
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

-- Writes what has changed.
local function keep()
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
    fields[n + 1], fields[n + 2] = '+', pack(BOOK, unpack(book, 1, 13))
    n = n + 2
  end
  for i = 1, count do
    if scopes[i].slots ~= (tonumber(known[1 + i]) or 0) then
      fields[n + 1], fields[n + 2] = asked[1 + i], scopes[i].slots
      n = n + 2
    end
  end
  for name, by in pairs(elsewhere or {}) do
    if by ~= 0 then call('HINCRBY', OPEN, '#' .. name, by) end
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

_RESERVE: Final = """
-- Returns why a request is refused, by which scope, how many ms it should wait ('': not known, or never), and whether for a
-- claim.
local function judge(tokens, requests, slots)
  local reason, place, wait = nil, nil, 0
  tokens, requests = tokens * UNIT, requests * UNIT
  for i = 1, count do
    local scope = scopes[i]
    if tokens > scope.token_burst or requests > scope.request_burst then reason, place = 'burst', i end
  end
  if reason then return reason, place, '', 0 end
  local is_claimed = 0
  for i = 1, count do
    local scope = scopes[i]
    if scope.requests < requests then
      local ms = math.ceil((requests - scope.requests) / scope.request_rate)
      if ms >= wait then reason, place, wait, is_claimed = 'requests', i, ms, 0 end
    end
    local ms, by_claim = 0, 0
    if scope.tokens < tokens then ms = math.ceil((tokens - scope.tokens) / scope.token_rate) end
    if tokens < scope.claim then
      by_claim = 1
      ms = max(ms, scope.claim_to - now)
    end
    if ms > 0 and ms >= wait then reason, place, wait, is_claimed = 'tokens', i, ms, by_claim end
  end
  if reason then return reason, place, wait, is_claimed end
  for i = 1, count do
    local scope = scopes[i]
    if scope.slots + slots > scope.slots_max then reason, place = 'concurrency', i end
  end
  return reason, place, '', 0
end

local function leave_claim(scope, tokens, wait)
  if scope.claim == 0 and tokens > CLAIM_SHARE * scope.token_burst and now >= 2 * scope.claim_to - scope.claim_from then
    scope.claim, scope.claim_from = tokens, now
    scope.claim_to = now + wait + math.ceil(CLAIM_LATE * wait) + CLAIM_LATE_MS
    must_level = true
  end
end

-- One operation after the other; all that they change is written at the end.
local answers, must_keep = {}, false
at = 3 + count
while at <= #ARGV do
local operation, numbers, rid, answer = ARGV[at], ARGV[at + 1], ARGV[at + 2], nil
local names = named(operation, numbers)

if operation == 'reserve' then
  local tokens, requests, slots, lease, force = read('<ddddd', numbers)
  sweep(SWEEP_MAX)
  local is_repeated, reason, place, wait, is_claimed = find(rid) ~= nil, nil, nil, nil, nil
  if not is_repeated then
    if force == 0 then reason, place, wait, is_claimed = judge(tokens, requests, slots) end
    if not reason then
      local row = new_row(tokens, requests, slots)
      take(row, tokens, requests)
      add(RESERVED, tokens)
      put(rid, row, now + lease)
      must_level = true
      for i = 1, count do
        local scope = scopes[i]
        if scope.claim > 0 and tokens * UNIT >= scope.claim then scope.claim, scope.claim_to = 0, now end
      end
    end
  end
  if reason then
    local name = ARGV[2 + place]
    if reason == 'tokens' and is_claimed == 0 and sub(name, 1, 13) ~= 'organisation:' then
      leave_claim(scopes[place], tokens * UNIT, wait)
    end
    answer = {'denied', reason, name, wait, is_claimed, remaining()}
  else
    answer = {'granted', is_repeated and 1 or 0, remaining()}
  end
"""

_SETTLE: Final = """
elseif operation == 'settle' then
  local actual, used_requests = read('<dd', numbers)
  local row = find(rid)
  local state, refunded, overrun = 'settled', 0, 0
  if not row then
    state = 'unknown'
    bury(rid, {state = 's'}, true)
  elseif row.state == 's' then
    state = 'repeated'
  else
    local tokens = max(0, actual - row.used)
    overrun = max(0, tokens - row.tokens)
    if row.state == 'o' then
      refunded = max(0, row.tokens - tokens)
      local unused = used_requests < 0 and 0
        or min(row.requests, max(0, row.requests - max(0, used_requests - row.used_requests)))
      add(SETTLED, row.tokens - refunded)
      add(REFUNDED, refunded)
      take(row, overrun - refunded, -unused)
      add(LIVE, -1)
      hold(row, -row.slots)
    else
      state = 'late'
      take(row, overrun, 0)
    end
    add(OVERRUN, overrun)
    bury(rid, {state = 's'})
  end
  must_level = must_level or state ~= 'repeated'
  answer = {state, refunded, overrun, remaining()}
"""

_RENEW: Final = """
elseif operation == 'renew' then
  local lease, states = read('<d', numbers), {}
  for item = 1, names do
    rid = ARGV[at + 1 + item]
    local tokens, requests, slots, extra = read('<dddd', numbers, 32 * item - 23)
    local row, state = find(rid), 'renewed'
    if not row then
      state, row = 'recreated', new_row(tokens + extra, requests, slots)
      take(row, tokens + extra, requests, true)
      add(RESERVED, tokens)
      add(EXTENDED, extra)
      add(RECREATED, 1)
    elseif row.state == 's' then
      state = 'settled'
    else
      if row.state == 'w' then
        state = 'reopened'
        reopen(row)
      end
      local longer = max(0, tokens + extra - row.tokens)
      row.tokens = row.tokens + longer
      take(row, longer, 0)
      add(EXTENDED, longer)
    end
    if state ~= 'settled' then put(rid, row, now + lease) end
    states[item] = state
  end
  must_level = true
  answer = {states, remaining()}
"""

_DRAW: Final = """
elseif operation == 'draw' then
  local draw, lease, used, used_requests, tokens, requests, slots, least_tokens, least_slots =
    read('<ddddddddd', numbers)
  sweep(SWEEP_MAX)
  local row = find(rid)
  if row and row.state == 's' then
    answer = {0, 0, 0, 0, remaining()}
  else
    if not row then
      row = new_row(0, 0, 0)
      if draw > 1 then
        row.used, row.used_requests = used, used_requests
        add(RECREATED, 1)
      end
    end
    if row.state == 'w' then reopen(row) end
    if draw > row.drawn then
      row.drawn = draw
      local spent = max(0, used - row.used)
      local overrun = max(0, spent - row.tokens)
      add(SETTLED, spent - overrun)
      add(OVERRUN, overrun)
      take(row, overrun, 0)
      row.tokens, row.used = row.tokens - spent + overrun, row.used + spent
      local admitted = max(0, used_requests - row.used_requests)
      row.requests, row.used_requests = max(0, row.requests - admitted), row.used_requests + admitted

      local free_requests, free_tokens, free_slots = least()
      for i = 1, count do
        if scopes[i].claim > 0 then free_tokens = 0 end
      end
      local t = max(tokens, least_tokens) - row.tokens
      if t > 0 then
        t = max(min(t, max(0, floor(free_tokens / UNIT))), least_tokens - row.tokens)
        add(RESERVED, t)
      else
        add(REFUNDED, -t)
      end
      local r = min(requests - row.requests, max(0, floor(free_requests / UNIT)))
      local s = max(slots, least_slots) - row.slots
      if s > 0 then s = max(min(s, max(0, free_slots)), least_slots - row.slots) end
      take(row, t, r)
      hold(row, s)
      row.tokens, row.requests, row.slots = row.tokens + t, row.requests + r, row.slots + s
    end
    put(rid, row, now + lease)
    must_level = true
    answer = {1, row.tokens, row.requests, row.slots, remaining()}
  end
"""

_REST: Final = """
elseif operation == 'spend' then
  local tokens, requests = read('<dd', numbers)
  local is_repeated = rid ~= '' and find(rid) ~= nil
  if not is_repeated then
    take({within = within}, tokens, requests, true)
    add(SPENT, tokens)
    if rid ~= '' then bury(rid, {state = 's'}, true) end
    must_level = true
  end
  answer = {is_repeated and 1 or 0, remaining()}

elseif operation == 'sweep' then
  local most = read('<d', numbers)
  local swept, tokens, seen = sweep(most)
  answer = {swept, tokens, seen < most and 1 or 0}

elseif operation == 'show' then
  local uses = {}
  for i = 1, count do
    local scope = scopes[i]
    uses[i] = {shown(scope.requests), shown(scope.tokens), scope.slots}
  end
  answer = {uses, {unpack(book, 1, ROWS)}}

else
  return redis.error_reply('ERR unknown operation ' .. operation)
end
answers[#answers + 1] = answer
at = at + 2 + names
must_keep = must_keep or operation ~= 'show'
end
if must_keep then keep() end
return answers
"""

TEXT: Final = _READ + _WRITE + _RESERVE + _SETTLE + _RENEW + _DRAW + _REST
