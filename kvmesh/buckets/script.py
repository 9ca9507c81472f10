"""The budget of one organisation as a script that Redis runs: every operation is one atomic step. Redis 6.2.

Commands of Redis 6.2 alone; on a Cluster too.

KEYS, of one hash tag:
1 levels  hash  scope -> "<request level> <token level> <ms>": how full the two buckets were at that time; "-": not limited
2 open    hash  rid -> a reservation, or what is remembered of it; "#<scope>" -> slots held; "+<name>" -> the ledger
3 leases  sorted set  rid -> when its lease ends, or when it may be forgotten, in ms

A level counts in sixty-thousandths: what a rate of 1 per minute adds in 1 ms. So all sums are exact. Levels are at most the
burst; below 0 they are debt. A reservation is "<state> <tokens> <requests> <slots> <used tokens> <used requests> <number>
<scopes, one a line>", state o: open, w: swept. "s" alone: settled.

ARGV: operation, now in ms (0: the server's own clock; anything else is for tests), number of scopes, then per scope
name, requests per minute, their burst in sixty-thousandths, tokens per minute, their burst likewise, slots; then what the
operation takes (see wire). A rate or a number of slots of 0: not limited.

Slots, reservations and ledger live in one hash so that they are lost together; leases that do not fit it empty it.
"""

from __future__ import annotations

from typing import Final

_COMMON: Final = """
redis.replicate_commands()
local UNIT, DAY_MS, SETTLED_MS, SWEPT_MS = 60000, 86400000, 30000, 3600000
local TOMBSTONES_MAX, SWEEP_MAX = 50000, 100
local LEVELS, OPEN, LEASES = KEYS[1], KEYS[2], KEYS[3]
local operation, now, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local at = 4 + 6 * count
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local names, scopes, ledger = {}, {}, {}
local known_rows, known_live, is_clock_back = 0, 0, false

local function full_at(text, rate, burst, ms)
  if rate == 0 then return nil end
  local level = tonumber(text)
  if not level then return burst end
  return math.min(burst, level + ms * rate)
end

local function read_levels()
  for i = 1, count do
    names[i] = ARGV[6 * i - 2]
  end
  local known = count > 0 and redis.call('HMGET', LEVELS, unpack(names)) or {}
  for i = 1, count do
    local a = 6 * i - 2
    local scope = {
      request_rate = tonumber(ARGV[a + 1]), request_burst = tonumber(ARGV[a + 2]),
      token_rate = tonumber(ARGV[a + 3]), token_burst = tonumber(ARGV[a + 4]),
      slots_max = tonumber(ARGV[a + 5]), slots = 0,
    }
    local requests, tokens, ms = string.match(known[i] or '', '^(%S+) (%S+) (%S+)$')
    local past = now - (tonumber(ms) or now)
    if past < 0 then
      past, is_clock_back = 0, true
    end
    scope.requests = full_at(requests, scope.request_rate, scope.request_burst, past)
    scope.tokens = full_at(tokens, scope.token_rate, scope.token_burst, past)
    scopes[i] = scope
  end
end

local function write_levels()
  if count == 0 then return end
  local fields = {}
  for i, scope in ipairs(scopes) do
    fields[2 * i - 1] = names[i]
    fields[2 * i] = string.format('%s %s %.0f',
      scope.requests and string.format('%.17g', scope.requests) or '-',
      scope.tokens and string.format('%.17g', scope.tokens) or '-', now)
  end
  redis.call('HSET', LEVELS, unpack(fields))
end

local function add(name, number)
  ledger[name] = (ledger[name] or 0) + number
end

local function read_open()
  local fields = {'+rows', '+live'}
  for i = 1, count do
    fields[i + 2] = '#' .. names[i]
  end
  local known = redis.call('HMGET', OPEN, unpack(fields))
  known_rows, known_live = tonumber(known[1]) or 0, tonumber(known[2]) or 0
  if redis.call('ZCARD', LEASES) ~= known_rows then
    redis.call('DEL', OPEN, LEASES)
    known_rows, known_live, known = 0, 0, {}
  end
  for i, scope in ipairs(scopes) do
    scope.slots = tonumber(known[i + 2]) or 0
  end
end

local function slots_of(i)
  return scopes[i].slots + (ledger['#' .. names[i]] or 0)
end

local function row_of(text)
  if not text then return nil end
  if text == 's' then return {state = 's'} end
  local state, tokens, requests, slots, used, used_requests, number, within =
    string.match(text, '^(%a) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  return {
    state = state, tokens = tonumber(tokens), requests = tonumber(requests), slots = tonumber(slots),
    used = tonumber(used), used_requests = tonumber(used_requests), number = tonumber(number), within = within,
  }
end

local function find(rid)
  return row_of(redis.call('HGET', OPEN, rid))
end

local function put(rid, row, ends)
  redis.call('HSET', OPEN, rid, row.state == 's' and 's' or string.format('%s %.0f %.0f %.0f %.0f %.0f %.0f %s',
    row.state, row.tokens, row.requests, row.slots, row.used, row.used_requests, row.number, row.within))
  redis.call('ZADD', LEASES, ends, rid)
end

local function hold(row, slots)
  if slots ~= 0 then
    for name in string.gmatch(row.within, '[^\\n]+') do add('#' .. name, slots) end
  end
end

local function new_row(tokens, requests, slots)
  add('+rows', 1)
  add('+live', 1)
  return {
    state = 'o', tokens = tokens, requests = requests, slots = slots, used = 0, used_requests = 0, number = 0,
    within = table.concat(names, '\\n'),
  }
end

local function bury(rid, row, is_new)
  local rows, live = known_rows + (ledger['+rows'] or 0), known_live + (ledger['+live'] or 0)
  if rows - live - (is_new and 0 or 1) < TOMBSTONES_MAX then
    if is_new then add('+rows', 1) end
    put(rid, row, now + (row.state == 's' and SETTLED_MS or SWEPT_MS))
  elseif not is_new then
    redis.call('HDEL', OPEN, rid)
    redis.call('ZREM', LEASES, rid)
    add('+rows', -1)
  end
end

local function shut(row)
  add('+live', -1)
  hold(row, -row.slots)
end

local function reopen(row)
  row.state = 'o'
  add('+live', 1)
  hold(row, row.slots)
  add('+swept', -row.tokens)
  add('+reopened', 1)
end

local function sweep(most)
  local due = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, most)
  local swept, tokens, gone = 0, 0, {}
  if #due > 0 then
    local known = redis.call('HMGET', OPEN, unpack(due))
    for i, rid in ipairs(due) do
      local row = row_of(known[i])
      if row and row.state == 'o' then
        shut(row)
        row.state = 'w'
        swept, tokens = swept + 1, tokens + row.tokens
        bury(rid, row)
      else
        gone[#gone + 1] = rid
      end
    end
  end
  if #gone > 0 then
    redis.call('HDEL', OPEN, unpack(gone))
    redis.call('ZREM', LEASES, unpack(gone))
    add('+rows', -#gone)
  end
  if swept > 0 then
    add('+swept', tokens)
    add('+sweeps', swept)
  end
  return swept, tokens, #due
end

local function counts(row, i)
  return string.find('\\n' .. row.within .. '\\n', '\\n' .. names[i] .. '\\n', 1, true) ~= nil
end

local function take(row, tokens, requests, is_floored)
  for i, scope in ipairs(scopes) do
    if counts(row, i) then
      local token_level = scope.tokens and math.min(scope.token_burst, scope.tokens - tokens * UNIT)
      local request_level = scope.requests and math.min(scope.request_burst, scope.requests - requests * UNIT)
      if is_floored then
        token_level = token_level and math.max(token_level, math.min(scope.tokens, 0))
        request_level = request_level and math.max(request_level, math.min(scope.requests, 0))
      end
      scope.tokens, scope.requests = token_level, request_level
    end
  end
end

local function judge(tokens, requests, slots)
  local reason, name, wait = nil, nil, 0
  for i, scope in ipairs(scopes) do
    if (scope.tokens and tokens * UNIT > scope.token_burst)
      or (scope.requests and requests * UNIT > scope.request_burst) then
      reason, name = 'burst', names[i]
    end
  end
  if reason then return reason, name, '' end
  for i, scope in ipairs(scopes) do
    if scope.requests and scope.requests < requests * UNIT then
      local ms = math.ceil((requests * UNIT - scope.requests) / scope.request_rate)
      if ms >= wait then reason, name, wait = 'requests', names[i], ms end
    end
    if scope.tokens and scope.tokens < tokens * UNIT then
      local ms = math.ceil((tokens * UNIT - scope.tokens) / scope.token_rate)
      if ms >= wait then reason, name, wait = 'tokens', names[i], ms end
    end
  end
  if reason then return reason, name, string.format('%.0f', wait) end
  for i, scope in ipairs(scopes) do
    if scope.slots_max > 0 and slots_of(i) + slots > scope.slots_max then
      reason, name = 'concurrency', names[i]
    end
  end
  return reason, name, ''
end

local function least()
  local requests, tokens, slots = math.huge, math.huge, math.huge
  for i, scope in ipairs(scopes) do
    requests = math.min(requests, scope.requests or math.huge)
    tokens = math.min(tokens, scope.tokens or math.huge)
    if scope.slots_max > 0 then slots = math.min(slots, scope.slots_max - slots_of(i)) end
  end
  return requests, tokens, slots
end

local function shown(number)
  if not number or number == math.huge then return '' end
  return string.format('%.17g', number)
end

local function remaining()
  local requests, tokens, slots = least()
  return shown(requests), shown(tokens), shown(slots)
end

local function keep(is_refused)
  if not is_refused or is_clock_back then write_levels() end
  redis.call('PEXPIRE', LEVELS, DAY_MS)
  local has_changed = not is_refused
  for name, number in pairs(ledger) do
    has_changed = true
    if number ~= 0 then redis.call('HINCRBY', OPEN, name, number) end
  end
  if has_changed then
    redis.call('PEXPIRE', OPEN, DAY_MS)
    redis.call('PEXPIRE', LEASES, DAY_MS)
  end
end
"""

_RESERVE: Final = """
if operation == 'reserve' then
  local rid, tokens, requests = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local slots, lease, force = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), ARGV[at + 5] == '1'
  read_levels()
  read_open()
  sweep(SWEEP_MAX)
  local is_repeated = redis.call('HEXISTS', OPEN, rid) == 1
  if not is_repeated then
    local reason, name, wait = nil, nil, nil
    if not force then reason, name, wait = judge(tokens, requests, slots) end
    if reason then
      keep(true)
      return {'denied', reason, name, wait, remaining()}
    end
    local row = new_row(tokens, requests, slots)
    hold(row, slots)
    take(row, tokens, requests)
    add('+reserved', tokens)
    put(rid, row, now + lease)
  end
  keep(is_repeated)
  return {'granted', is_repeated and 1 or 0, remaining()}
end
"""

_SETTLE: Final = """
if operation == 'settle' then
  local rid, actual, used_requests = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  read_levels()
  read_open()
  local row = find(rid)
  local state, refunded, overrun = 'settled', 0, 0
  if not row then
    state = 'unknown'
    bury(rid, {state = 's'}, true)
  elseif row.state == 's' then
    state = 'repeated'
  else
    local tokens = math.max(0, actual - row.used)
    overrun = math.max(0, tokens - row.tokens)
    if row.state == 'o' then
      refunded = math.max(0, row.tokens - tokens)
      local unused = used_requests < 0 and 0
        or math.min(row.requests, math.max(0, row.requests - math.max(0, used_requests - row.used_requests)))
      add('+settled', row.tokens - refunded)
      add('+refunded', refunded)
      take(row, overrun - refunded, -unused)
      shut(row)
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
  read_levels()
  read_open()
  for item = 1, items do
    local a = at + 5 * item - 3
    local rid, tokens, requests = ARGV[a], tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
    local slots, extra = tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4])
    local row, state = find(rid), 'renewed'
    if not row then
      state, row = 'recreated', new_row(tokens + extra, requests, slots)
      hold(row, slots)
      take(row, tokens + extra, requests, true)
      add('+reserved', tokens)
      add('+extended', extra)
      add('+recreated', 1)
    elseif row.state == 's' then
      state = 'settled'
    else
      if row.state == 'w' then
        state = 'reopened'
        reopen(row)
      end
      local more = math.max(0, tokens + extra - row.tokens)
      row.tokens = row.tokens + more
      take(row, more, 0)
      add('+extended', more)
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
  local rid, number, lease = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local used, used_requests = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local tokens, requests, slots = tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7])
  local least_tokens, least_slots = tonumber(ARGV[at + 8]), tonumber(ARGV[at + 9])
  read_levels()
  read_open()
  sweep(SWEEP_MAX)
  local row = find(rid)
  if row and row.state == 's' then
    keep(true)
    return {0, 0, 0, 0, remaining()}
  end
  if not row then
    row = new_row(0, 0, 0)
    if number > 1 then
      row.used, row.used_requests = used, used_requests
      add('+recreated', 1)
    end
  end
  if row.state == 'w' then reopen(row) end
  if number > row.number then
    row.number = number
    local spent = math.max(0, used - row.used)
    local overrun = math.max(0, spent - row.tokens)
    add('+settled', spent - overrun)
    add('+overrun', overrun)
    take(row, overrun, 0)
    row.tokens, row.used = row.tokens - spent + overrun, row.used + spent
    local admitted = math.max(0, used_requests - row.used_requests)
    row.requests, row.used_requests = math.max(0, row.requests - admitted), row.used_requests + admitted

    local free_requests, free_tokens, free_slots = least()
    local more = math.max(tokens, least_tokens) - row.tokens
    if more > 0 then
      more = math.max(math.min(more, math.max(0, math.floor(free_tokens / UNIT))), least_tokens - row.tokens)
      add('+reserved', more)
    else
      add('+refunded', -more)
    end
    local more_requests = math.min(requests - row.requests, math.max(0, math.floor(free_requests / UNIT)))
    local more_slots = math.max(slots, least_slots) - row.slots
    if more_slots > 0 then
      more_slots = math.max(math.min(more_slots, math.max(0, free_slots)), least_slots - row.slots)
    end
    take(row, more, more_requests)
    hold(row, more_slots)
    row.tokens, row.requests, row.slots = row.tokens + more, row.requests + more_requests, row.slots + more_slots
  end
  put(rid, row, now + lease)
  keep(false)
  return {1, row.tokens, row.requests, row.slots, remaining()}
end
"""

_REST: Final = """
if operation == 'spend' then
  local rid, tokens, requests = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  read_levels()
  read_open()
  local is_repeated = rid ~= '' and redis.call('HEXISTS', OPEN, rid) == 1
  if not is_repeated then
    take({within = table.concat(names, '\\n')}, tokens, requests, true)
    add('+spent', tokens)
    if rid ~= '' then bury(rid, {state = 's'}, true) end
  end
  keep(is_repeated)
  return {is_repeated and 1 or 0, remaining()}
end

if operation == 'sweep' then
  local most = tonumber(ARGV[at])
  read_levels()
  read_open()
  local swept, tokens, seen = sweep(most)
  keep(true)
  return {swept, tokens, seen < most and 1 or 0}
end

if operation == 'show' then
  read_levels()
  read_open()
  local uses = {}
  for i, scope in ipairs(scopes) do
    uses[i] = {shown(scope.requests), shown(scope.tokens), scope.slots}
  end
  return {uses, redis.call('HMGET', OPEN, '+reserved', '+extended', '+settled', '+refunded', '+swept', '+overrun',
    '+spent', '+sweeps', '+reopened', '+recreated', '+live', '+rows')}
end

return redis.error_reply('ERR unknown operation ' .. operation)
"""

TEXT: Final = _COMMON + _RESERVE + _SETTLE + _RENEW + _DRAW + _REST
