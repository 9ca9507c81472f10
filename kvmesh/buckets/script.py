"""The budget of one organisation as a script that Redis runs: every operation is one atomic step.

Commands of Redis 6.2 alone; on a Cluster too. KEYS, of one hash tag:
1 levels  hash  scope -> "<request level> <token level> <ms>": how full the two buckets were at that time; "-": not limited
2 open    hash  rid -> a reservation, or what is remembered of it; "#<scope>" -> slots held; "+<name>" -> the ledger
3 leases  sorted set  rid -> when its lease ends, or when it may be forgotten, in ms

A level counts in sixty-thousandths: what a rate of 1 per minute adds in 1 ms. So all sums are exact. Levels are at most the
burst; below 0 they are debt. A reservation is "<state> <tokens> <requests> <slots> <used tokens> <used requests> <number>
<scopes, one a line>", state o: open, w: swept. "s" alone: settled.

ARGV: operation, now in ms (0: the server's own clock; anything else is for tests), number of scopes, then per scope
name, requests per minute, their burst in sixty-thousandths, tokens per minute, their burst likewise, slots; then what the
operation takes (see wire). A rate or a number of slots of 0: not limited.

Slots, reservations and ledger live in one hash so that they are lost together; leases that do not fit it empty it. Reads
come first and writes last, each of them one command: most of the cost is the number of commands.
"""

from __future__ import annotations

from typing import Final

_READ: Final = """
redis.replicate_commands()
local UNIT, LIFE_MS, TOUCH_MS, SETTLED_MS, SWEPT_MS = 60000, 90000000, 3600000, 300000, 3600000
local TOMBSTONES_MAX, SWEEP_MAX, BUNCH_MS = 50000, 100, 256
local LEVELS, OPEN, LEASES = KEYS[1], KEYS[2], KEYS[3]
local call, floor, max, min, format, match = redis.call, math.floor, math.max, math.min, string.format, string.match
local operation, now, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local at = 4 + 6 * count
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end

-- What is known: names and levels of the scopes, and by their place in `asked` the numbers that most operations need.
-- What becomes of it: `more` by place, `others` by name, `rows` and `ends` by rid (false: gone).
local ROWS, LIVE, TOUCHED, RESERVED, SETTLED, REFUNDED, SLOTS = 1, 2, 3, 4, 5, 6, 6
local asked = {'+rows', '+live', '+touched', '+reserved', '+settled', '+refunded'}
local names, scopes, number, more, others, rows, ends = {}, {}, {}, {0, 0, 0, 0, 0, 0}, {}, {}, {}
local must_touch, is_clock_back = false, false

for i = 1, count do
  names[i] = ARGV[6 * i - 2]
  asked[SLOTS + i] = '#' .. names[i]
  more[SLOTS + i] = 0
end
local within = table.concat(names, '\\n')
local first_rid = ARGV[at] or ''
local known = call('HMGET', OPEN, first_rid, unpack(asked))
if call('ZCARD', LEASES) ~= (tonumber(known[2]) or 0) then
  call('UNLINK', OPEN, LEASES)
  known = {}
end
local first_text = known[1]
for i = 1, SLOTS + count do
  number[i] = tonumber(known[i + 1]) or 0
end

known = count > 0 and call('HMGET', LEVELS, unpack(names)) or {}
for i = 1, count do
  local a = 6 * i - 2
  local scope = {
    request_rate = tonumber(ARGV[a + 1]), request_burst = tonumber(ARGV[a + 2]),
    token_rate = tonumber(ARGV[a + 3]), token_burst = tonumber(ARGV[a + 4]), slots_max = tonumber(ARGV[a + 5]),
  }
  local requests, tokens, ms = nil, nil, nil
  if known[i] then
    requests, tokens, ms = match(known[i], '^(%S+) (%S+) (%S+)$')
  else
    must_touch = true
  end
  local past = now - (tonumber(ms) or now)
  if past < 0 then
    past, is_clock_back = 0, true
  end
  if scope.request_rate > 0 then
    scope.requests = min(scope.request_burst, (tonumber(requests) or scope.request_burst) + past * scope.request_rate)
  end
  if scope.token_rate > 0 then
    scope.tokens = min(scope.token_burst, (tonumber(tokens) or scope.token_burst) + past * scope.token_rate)
  end
  scopes[i] = scope
end

local function value(place)
  return number[place] + more[place]
end

local function add(name, by)
  others[name] = (others[name] or 0) + by
end

local function parsed(text)
  if not text then return nil end
  if text == 's' then return {state = 's'} end
  local state, tokens, requests, slots, used, used_requests, drawn, scoped =
    match(text, '^(%a) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  return {
    state = state, tokens = tonumber(tokens), requests = tonumber(requests), slots = tonumber(slots),
    used = tonumber(used), used_requests = tonumber(used_requests), drawn = tonumber(drawn), within = scoped,
  }
end

local function find(rid)
  if rows[rid] ~= nil then return parsed(rows[rid]) end
  if rid == first_rid then return parsed(first_text) end
  return parsed(call('HGET', OPEN, rid))
end
"""

_WRITE: Final = """
local function put(rid, row, ms)
  rows[rid] = row.state == 's' and 's' or format('%s %d %d %d %d %d %d %s',
    row.state, row.tokens, row.requests, row.slots, row.used, row.used_requests, row.drawn, row.within)
  ends[rid] = ms
end

local function hold(row, slots)
  if slots == 0 then return end
  if row.within == within then
    for i = SLOTS + 1, SLOTS + count do more[i] = more[i] + slots end
  else
    for name in string.gmatch(row.within, '[^\\n]+') do
      local place = nil
      for i = 1, count do place = names[i] == name and SLOTS + i or place end
      if place then
        more[place] = more[place] + slots
      else
        add('#' .. name, slots)
      end
    end
  end
end

local function new_row(tokens, requests, slots)
  more[ROWS] = more[ROWS] + 1
  more[LIVE] = more[LIVE] + 1
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
  if value(ROWS) - value(LIVE) - (is_new and 0 or 1) < TOMBSTONES_MAX then
    if is_new then more[ROWS] = more[ROWS] + 1 end
    local ms = now + (row.state == 's' and SETTLED_MS or SWEPT_MS)
    put(rid, row, ms + BUNCH_MS - ms % BUNCH_MS)
  elseif not is_new then
    more[ROWS] = more[ROWS] - 1
    rows[rid] = false
  end
end

local function sweep(most)
  local due = call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, most)
  local swept, tokens = 0, 0
  if #due > 0 then
    local texts = call('HMGET', OPEN, unpack(due))
    for i, rid in ipairs(due) do
      local row = parsed(texts[i])
      if row and row.state == 'o' then
        swept, tokens = swept + 1, tokens + row.tokens
        more[LIVE] = more[LIVE] - 1
        hold(row, -row.slots)
        row.state = 'w'
        bury(rid, row)
      else
        more[ROWS] = more[ROWS] - 1
        rows[rid] = false
      end
    end
    if swept > 0 then
      add('+swept', tokens)
      add('+sweeps', swept)
    end
  end
  return swept, tokens, #due
end

local function reopen(row)
  row.state = 'o'
  more[LIVE] = more[LIVE] + 1
  hold(row, row.slots)
  add('+swept', -row.tokens)
  add('+reopened', 1)
end

-- Takes from the levels of the scopes that `row` counts in, or gives back what is below 0. `is_floored`: not below 0.
local function take(row, tokens, requests, is_floored)
  for i = 1, count do
    local scope = scopes[i]
    if row.within == within or string.find('\\n' .. row.within .. '\\n', '\\n' .. names[i] .. '\\n', 1, true) then
      if scope.tokens then
        local level = min(scope.token_burst, scope.tokens - tokens * UNIT)
        scope.tokens = is_floored and max(level, min(scope.tokens, 0)) or level
      end
      if scope.requests then
        local level = min(scope.request_burst, scope.requests - requests * UNIT)
        scope.requests = is_floored and max(level, min(scope.requests, 0)) or level
      end
    end
  end
end

local function least()
  local requests, tokens, slots = math.huge, math.huge, math.huge
  for i = 1, count do
    local scope = scopes[i]
    if scope.requests then requests = min(requests, scope.requests) end
    if scope.tokens then tokens = min(tokens, scope.tokens) end
    if scope.slots_max > 0 then slots = min(slots, scope.slots_max - value(SLOTS + i)) end
  end
  return requests, tokens, slots
end

local function shown(level)
  return level and level < math.huge and floor(level) or ''
end

local function remaining()
  local requests, tokens, slots = least()
  return shown(requests), shown(tokens), shown(slots)
end

local function exact(level)
  return level and format(level % 1 == 0 and '%d' or '%.17g', level) or '-'
end

-- Writes what has changed. `is_refused`: levels have not.
local function keep(is_refused)
  if number[ROWS] == 0 or math.abs(now - number[TOUCHED]) > TOUCH_MS then must_touch = true end
  if must_touch then more[TOUCHED] = now - number[TOUCHED] end
  if count > 0 and (not is_refused or is_clock_back) then
    local fields = {}
    for i = 1, count do
      local requests, tokens = scopes[i].requests, scopes[i].tokens
      fields[2 * i - 1] = names[i]
      if requests and tokens and requests % 1 == 0 and tokens % 1 == 0 then
        fields[2 * i] = format('%d %d %d', requests, tokens, now)
      else
        fields[2 * i] = exact(requests) .. ' ' .. exact(tokens) .. format(' %d', now)
      end
    end
    call('HSET', LEVELS, unpack(fields))
  end
  local fields, gone, leases, n = {}, {}, {}, 0
  for rid, text in pairs(rows) do
    if text then
      fields[n + 1], fields[n + 2] = rid, text
      leases[n + 1], leases[n + 2] = ends[rid], rid
      n = n + 2
    else
      gone[#gone + 1] = rid
    end
  end
  if n > 0 then call('ZADD', LEASES, unpack(leases)) end
  for i = 1, SLOTS + count do
    if more[i] ~= 0 then
      fields[n + 1], fields[n + 2] = asked[i], number[i] + more[i]
      n = n + 2
    end
  end
  for name, by in pairs(others) do
    if by ~= 0 then call('HINCRBY', OPEN, name, by) end
  end
  if n > 0 then call('HSET', OPEN, unpack(fields)) end
  if #gone > 0 then
    call('HDEL', OPEN, unpack(gone))
    call('ZREM', LEASES, unpack(gone))
  end
  if must_touch then
    for i = 1, 3 do call('PEXPIRE', KEYS[i], LIFE_MS) end
  end
end
"""

_RESERVE: Final = """
local function judge(tokens, requests, slots)
  local reason, name, wait = nil, nil, 0
  for i = 1, count do
    local scope = scopes[i]
    if (scope.tokens and tokens * UNIT > scope.token_burst)
      or (scope.requests and requests * UNIT > scope.request_burst) then
      reason, name = 'burst', names[i]
    end
  end
  if reason then return reason, name, '' end
  for i = 1, count do
    local scope = scopes[i]
    if scope.requests and scope.requests < requests * UNIT then
      local ms = math.ceil((requests * UNIT - scope.requests) / scope.request_rate)
      if ms >= wait then reason, name, wait = 'requests', names[i], ms end
    end
    if scope.tokens and scope.tokens < tokens * UNIT then
      local ms = math.ceil((tokens * UNIT - scope.tokens) / scope.token_rate)
      if ms >= wait then reason, name, wait = 'tokens', names[i], ms end
    end
  end
  if reason then return reason, name, format('%d', wait) end
  for i = 1, count do
    local scope = scopes[i]
    if scope.slots_max > 0 and value(SLOTS + i) + slots > scope.slots_max then
      reason, name = 'concurrency', names[i]
    end
  end
  return reason, name, ''
end

if operation == 'reserve' then
  local rid, tokens, requests = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local slots, lease, force = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), ARGV[at + 5] == '1'
  sweep(SWEEP_MAX)
  local is_repeated = find(rid) ~= nil
  if not is_repeated then
    local reason, name, wait = nil, nil, nil
    if not force then reason, name, wait = judge(tokens, requests, slots) end
    if reason then
      keep(true)
      return {'denied', reason, name, wait, remaining()}
    end
    local row = new_row(tokens, requests, slots)
    take(row, tokens, requests)
    more[RESERVED] = more[RESERVED] + tokens
    put(rid, row, now + lease)
  end
  keep(is_repeated)
  return {'granted', is_repeated and 1 or 0, remaining()}
end
"""

_SETTLE: Final = """
if operation == 'settle' then
  local rid, actual, used_requests = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
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
      more[SETTLED] = more[SETTLED] + row.tokens - refunded
      more[REFUNDED] = more[REFUNDED] + refunded
      take(row, overrun - refunded, -unused)
      more[LIVE] = more[LIVE] - 1
      hold(row, -row.slots)
    else
      state = 'late'
      take(row, overrun, 0)
    end
    add('+overrun', overrun)
    bury(rid, {state = 's'})
  end
  keep(state == 'repeated')
  return {state, refunded, overrun, remaining()}
end
"""

_RENEW: Final = """
if operation == 'renew' then
  local lease, items, states = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), {}
  for item = 1, items do
    local a = at + 5 * item - 3
    local rid, tokens, requests = ARGV[a], tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
    local slots, extra = tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4])
    local row, state = find(rid), 'renewed'
    if not row then
      state, row = 'recreated', new_row(tokens + extra, requests, slots)
      take(row, tokens + extra, requests, true)
      more[RESERVED] = more[RESERVED] + tokens
      add('+extended', extra)
      add('+recreated', 1)
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
      add('+extended', longer)
    end
    if state ~= 'settled' then put(rid, row, now + lease) end
    states[item] = state
  end
  keep(false)
  return {states, remaining()}
end
"""

_DRAW: Final = """
if operation == 'draw' then
  local rid, draw, lease = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local used, used_requests = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local tokens, requests, slots = tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7])
  local least_tokens, least_slots = tonumber(ARGV[at + 8]), tonumber(ARGV[at + 9])
  sweep(SWEEP_MAX)
  local row = find(rid)
  if row and row.state == 's' then
    keep(true)
    return {0, 0, 0, 0, remaining()}
  end
  if not row then
    row = new_row(0, 0, 0)
    if draw > 1 then
      row.used, row.used_requests = used, used_requests
      add('+recreated', 1)
    end
  end
  if row.state == 'w' then reopen(row) end
  if draw > row.drawn then
    row.drawn = draw
    local spent = max(0, used - row.used)
    local overrun = max(0, spent - row.tokens)
    more[SETTLED] = more[SETTLED] + spent - overrun
    add('+overrun', overrun)
    take(row, overrun, 0)
    row.tokens, row.used = row.tokens - spent + overrun, row.used + spent
    local admitted = max(0, used_requests - row.used_requests)
    row.requests, row.used_requests = max(0, row.requests - admitted), row.used_requests + admitted

    local free_requests, free_tokens, free_slots = least()
    local t = max(tokens, least_tokens) - row.tokens
    if t > 0 then
      t = max(min(t, max(0, floor(free_tokens / UNIT))), least_tokens - row.tokens)
      more[RESERVED] = more[RESERVED] + t
    else
      more[REFUNDED] = more[REFUNDED] - t
    end
    local r = min(requests - row.requests, max(0, floor(free_requests / UNIT)))
    local s = max(slots, least_slots) - row.slots
    if s > 0 then s = max(min(s, max(0, free_slots)), least_slots - row.slots) end
    take(row, t, r)
    hold(row, s)
    row.tokens, row.requests, row.slots = row.tokens + t, row.requests + r, row.slots + s
  end
  put(rid, row, now + lease)
  keep(false)
  return {1, row.tokens, row.requests, row.slots, remaining()}
end
"""

_REST: Final = """
if operation == 'spend' then
  local rid, tokens, requests = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local is_repeated = rid ~= '' and find(rid) ~= nil
  if not is_repeated then
    take({within = within}, tokens, requests, true)
    add('+spent', tokens)
    if rid ~= '' then bury(rid, {state = 's'}, true) end
  end
  keep(is_repeated)
  return {is_repeated and 1 or 0, remaining()}
end

if operation == 'sweep' then
  local most = tonumber(ARGV[at])
  local swept, tokens, seen = sweep(most)
  keep(true)
  return {swept, tokens, seen < most and 1 or 0}
end

if operation == 'show' then
  local uses = {}
  for i = 1, count do
    local scope = scopes[i]
    uses[i] = {shown(scope.requests), shown(scope.tokens), number[SLOTS + i]}
  end
  return {uses, call('HMGET', OPEN, '+reserved', '+extended', '+settled', '+refunded', '+swept', '+overrun',
    '+spent', '+sweeps', '+reopened', '+recreated', '+live', '+rows')}
end

return redis.error_reply('ERR unknown operation ' .. operation)
"""

TEXT: Final = _READ + _WRITE + _RESERVE + _SETTLE + _RENEW + _DRAW + _REST
