-- The budget of one organisation, nested token buckets: runs operations of one account in order, each of them atomic.
--
-- Needs no command newer than Redis 6.2, and runs on a Redis Cluster. KEYS, all with one hash tag:
--   1 levels  Hash of scope -> request level, token level, and the time in ms at which the buckets had them; inf: not
--             limited. With a claim follow its tokens, its start and its end in ms.
--   2 open    Hash of rid -> a reservation or its tombstone; "#<scope>" -> slots held; "#~<scope>" -> open overrun, its
--             epoch, and the part that quota leases hold free; "+" -> the ledger, and the epoch of all open overrun.
--   3 leases  Sorted set of rid -> the time in ms at which the lease ends, or at which the tombstone may be forgotten.
--
-- A level is in units of 1/60000, the amount that a rate of 1 per minute adds in 1 ms. All sums are therefore exact.
-- A level is at most the burst; a level below 0 is debt.
--
-- A row of `open` is a letter: o (open), w (swept) or s (settled). An s stands alone. After o and w follow tokens,
-- requests, slots, used tokens, used requests and the number of the last draw. Then follow the names of the scopes,
-- one per line. With an open overrun follow a line of "~", the overrun, its epoch, and the part of it that a quota
-- lease holds free.
--
-- The open overrun of a scope is the sum over its open reservations of the tokens that their requests may still use
-- beyond the reservation. An older release, which does not know open overrun, keeps the lines of reservations as they
-- are. It writes the ledger without the epoch whenever it changes anything. The next run of this script then starts a
-- new epoch. Overrun of an older epoch counts as 0, and renewals state it again within seconds.
--
-- A claim keeps a large request from starving beside small ones. A request that is refused for lack of tokens leaves
-- a claim behind, if it needs more than half of a burst. An organisation's scope takes no claims, because one tenant
-- must not hold up another. While a claim stands, smaller requests are refused, and quota leases get no more tokens.
-- The claim ends when a request of at least its size is admitted, or when its time is over: the Retry-After of the
-- refusal and a margin. For as long again no new claim is taken, so small requests have half of the time.
--
-- ARGV:
--   1         Now in ms; 0 takes the clock of the server. Anything else is for tests.
--   2         Per scope: requests per minute, their burst, tokens per minute, their burst, slots, tokens of open overrun.
--             Bursts are in units of 1/60000; inf means not limited.
--   3 ...     The names of the scopes, then the operations: each its name, its numbers and its rids (kvmesh/buckets/wire.py
--             packs them, kvmesh/buckets/operations.py says what they do).
--
-- Numbers are little-endian doubles, because formatting and parsing text would cost more than all sums. The script
-- returns one answer per operation, in their order.
--
-- INVARIANT: reserved + extended = settled + refunded + swept + tokens of open reservations (the ledger).
--
-- Slots, reservations and ledger are in one hash so that Redis loses them together. If `leases` does not fit that
-- hash, both are deleted. Reads come first and writes last, one command each for any number of operations: commands
-- take most of the script's time.

redis.replicate_commands()
-- UNIT: a level's parts of one token or request. LIFE_MS: time after which unused keys expire (25 h), set anew every
-- LIFE_EXTENSION_MS. SETTLED_MS and SWEPT_MS: time for which a tombstone is kept.
local UNIT, LIFE_MS, LIFE_EXTENSION_MS, SETTLED_MS, SWEPT_MS = 60000, 90000000, 3600000, 300000, 3600000
-- TOMBSTONES_MAX: tombstones per organisation. SWEEP_MAX: rows swept by one reservation or draw. FORGET_STEP_MS:
-- tombstones expire at multiples of it.
local TOMBSTONES_MAX, SWEEP_MAX, FORGET_STEP_MS = 50000, 100, 256
-- CLAIM_SHARE: part of a burst above which a request may leave a claim. A claim lasts for the Retry-After, CLAIM_LATE
-- of it, and CLAIM_LATE_MS.
local CLAIM_SHARE, CLAIM_LATE, CLAIM_LATE_MS = 0.5, 0.5, 500
local LEVELS, OPEN, LEASES = KEYS[1], KEYS[2], KEYS[3]
local call, floor, max, min, huge, sub = redis.call, math.floor, math.max, math.min, math.huge, string.sub
local pack, read = struct.pack, struct.unpack
local limits, now = ARGV[2], read('<d', ARGV[1])
local scope_count = #limits / 48
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end

-- State in memory, read once and written once. `ledger` has the indices below. `scopes` has one table per scope of
-- the call, `other_scopes` the changes of scopes that the call does not name. By rid: `stored` is the row as read,
-- `rows` the row to write (false: to delete), `due_ms` its score in `leases`.
local RESERVED, EXTENDED, SETTLED, REFUNDED, SWEPT, OVERRUN, SPENT = 1, 2, 3, 4, 5, 6, 7
local SWEEPS, REOPENED, RECREATED, LIVE, ROWS, LIFE_EXTENDED, EPOCH = 8, 9, 10, 11, 12, 13, 14
local LEDGER_FORMAT = '<ddddddddddddd'
local LEDGER_SIZE = 104
local scopes, other_scopes, rows, due_ms, stored = {}, nil, {}, {}, {}
local must_extend_life, must_write_ledger, must_write_levels = false, false, false

-- Returns how many reservations an operation names.
local function count_reservations(operation, numbers)
  if operation == 'renew' then return (#numbers - 8) / 40 end
  return (operation == 'show' or operation == 'sweep') and 0 or 1
end

local scope_names = table.concat(ARGV, '\n', 3, 2 + scope_count)
local fields_read, position = {'+'}, 3 + scope_count
for i = 1, scope_count do fields_read[1 + i], fields_read[1 + scope_count + i] = '#' .. ARGV[2 + i], '#~' .. ARGV[2 + i] end
while position <= #ARGV do
  local rid_count = count_reservations(ARGV[position], ARGV[position + 1])
  for i = 1, rid_count do fields_read[#fields_read + 1] = ARGV[position + 1 + i] end
  position = position + 2 + rid_count
end
local values_read = call('HMGET', OPEN, unpack(fields_read))
local ledger = values_read[1] and {read(LEDGER_FORMAT, values_read[1])} or {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
if call('ZCARD', LEASES) ~= ledger[ROWS] then
  call('UNLINK', OPEN, LEASES)
  values_read, ledger = {}, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
end
local rows_before = ledger[ROWS]
-- A release without open overrun writes the ledger without an epoch. A new epoch then starts at `now`.
local has_epoch = values_read[1] and #values_read[1] > LEDGER_SIZE
local epoch = has_epoch and read('<d', values_read[1], LEDGER_SIZE + 1) or now
for i = 2 + 2 * scope_count, #fields_read do stored[fields_read[i]] = values_read[i] or false end

-- Returns the open overrun in a scope's field, and the part of it that quota leases hold free. An older epoch counts
-- as 0.
local function unpack_overrun(text)
  if not text then return 0, 0 end
  local tokens, since, free = read('<ddd', text)
  if since ~= epoch then return 0, 0 end
  return tokens, free
end

local function pack_overrun(tokens, free)
  return pack('<ddd', max(0, tokens), epoch, max(0, free))
end

local levels = scope_count > 0 and call('HMGET', LEVELS, unpack(ARGV, 3, 2 + scope_count))
for i = 1, scope_count do
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
      past, must_write_levels = 0, true
    end
    if requests < huge then requests = min(requests, requests_then + past * request_rate) end
    if tokens < huge then tokens = min(tokens, tokens_then + past * token_rate) end
  else
    must_extend_life = true
  end
  local overrun, overrun_free = unpack_overrun(values_read[1 + scope_count + i])
  scopes[i] = {
    request_rate = request_rate, request_burst = request_burst, requests = requests,
    token_rate = token_rate, token_burst = token_burst, tokens = tokens,
    claim = now < claim_to and claim or 0, claim_from = claim_from, claim_to = claim_to,
    slots_max = slots_max, slots = tonumber(values_read[1 + i]) or 0,
    overrun_max = overrun_max, overrun = overrun, overrun_before = overrun,
    overrun_free = overrun_free, overrun_free_before = overrun_free,
  }
end

-- Adds `by` to the ledger's sum at `index`.
local function add_to_ledger(index, by)
  if by ~= 0 then
    ledger[index] = ledger[index] + by
    must_write_ledger = true
  end
end

-- Returns the row of `open` as a table, or nil where there is none.
local function unpack_row(text)
  if not text then return nil end
  local state = sub(text, 1, 1)
  if state == 's' then return {state = 's'} end
  local tokens, requests, slots, used, used_requests, drawn = read('<dddddd', text, 2)
  local overrun, overrun_free, to = 0, 0, -1
  if sub(text, -26, -25) == '\n~' then
    local overrun_then, since, free = read('<ddd', text, #text - 23)
    if since == epoch then overrun, overrun_free = overrun_then, free end
    to = -27
  end
  return {
    state = state, tokens = tokens, requests = requests, slots = slots, used = used, used_requests = used_requests,
    drawn = drawn, scope_names = sub(text, 50, to), overrun = overrun, overrun_free = overrun_free,
  }
end

-- Returns the reservation or tombstone of `rid` as earlier operations of this call left it, or nil.
local function find(rid)
  if rows[rid] ~= nil then return unpack_row(rows[rid]) end
  return unpack_row(stored[rid])
end

-- Keeps `row` for writing; its lease ends, or its tombstone expires, at `ms`.
local function write_row(rid, row, ms)
  rows[rid] = row.state == 's' and 's' or row.state
    .. pack('<dddddd', row.tokens, row.requests, row.slots, row.used, row.used_requests, row.drawn) .. row.scope_names
    .. (row.overrun > 0 and '\n~' .. pack('<ddd', row.overrun, epoch, row.overrun_free) or '')
  due_ms[rid] = ms
end

-- Adds `by` to a sum of all scopes of `row`; `what` is 'slots', 'overrun' or 'overrun_free'.
local function add_to_scopes(row, what, by)
  if by == 0 then return end
  if row.scope_names == scope_names then
    for i = 1, scope_count do scopes[i][what] = scopes[i][what] + by end
  else
    for name in string.gmatch(row.scope_names, '[^\n]+') do
      local index = nil
      for i = 1, scope_count do index = ARGV[2 + i] == name and i or index end
      if index then
        scopes[index][what] = scopes[index][what] + by
      else
        other_scopes = other_scopes or {slots = {}, overrun = {}, overrun_free = {}}
        other_scopes[what][name] = (other_scopes[what][name] or 0) + by
      end
    end
  end
end

local function add_slots(row, slots)
  add_to_scopes(row, 'slots', slots)
end

-- Sets the open overrun of `row`; `free` is the part that a quota lease has promised to no request yet.
local function set_overrun(row, overrun, free)
  free = free or 0
  add_to_scopes(row, 'overrun', overrun - row.overrun)
  add_to_scopes(row, 'overrun_free', free - row.overrun_free)
  must_write_ledger = must_write_ledger or overrun ~= row.overrun and not has_epoch
  row.overrun, row.overrun_free = overrun, free
end

-- Returns a new open reservation in the scopes of the call.
local function new_row(tokens, requests, slots)
  add_to_ledger(ROWS, 1)
  add_to_ledger(LIVE, 1)
  local row = {
    state = 'o', tokens = tokens, requests = requests, slots = slots, used = 0, used_requests = 0, drawn = 0,
    scope_names = scope_names, overrun = 0, overrun_free = 0,
  }
  add_slots(row, slots)
  return row
end

-- Replaces a reservation by a tombstone, a settled or a swept row. Beyond TOMBSTONES_MAX none is kept. Tombstones
-- expire at multiples of FORGET_STEP_MS, so that few sweeps find any.
local function write_tombstone(rid, row, is_new)
  if ledger[ROWS] - ledger[LIVE] - (is_new and 0 or 1) < TOMBSTONES_MAX then
    if is_new then add_to_ledger(ROWS, 1) end
    local ms = now + (row.state == 's' and SETTLED_MS or SWEPT_MS)
    write_row(rid, row, ms + FORGET_STEP_MS - ms % FORGET_STEP_MS)
  elseif not is_new then
    add_to_ledger(ROWS, -1)
    rows[rid] = false
  end
end

-- Closes up to `limit` reservations with an expired lease, at their estimate, and forgets tombstones that are due.
-- Returns how many reservations were swept, their tokens, and how many rows were due.
local function sweep(limit)
  local due = call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, limit)
  local swept, tokens = 0, 0
  if #due > 0 then
    local found = call('HMGET', OPEN, unpack(due))
    for i, rid in ipairs(due) do
      -- Any other row was renewed or deleted by an earlier operation of this call.
      if rows[rid] == nil or rows[rid] and due_ms[rid] <= now then
        local row = unpack_row(rows[rid] or found[i])
        if row and row.state == 'o' then
          swept, tokens = swept + 1, tokens + row.tokens
          add_to_ledger(LIVE, -1)
          add_slots(row, -row.slots)
          set_overrun(row, 0)
          row.state = 'w'
          write_tombstone(rid, row)
        else
          add_to_ledger(ROWS, -1)
          rows[rid] = false
        end
      end
    end
    add_to_ledger(SWEPT, tokens)
    add_to_ledger(SWEEPS, swept)
  end
  return swept, tokens, #due
end

-- Turns a swept reservation into an open one.
local function reopen(row)
  row.state = 'o'
  add_to_ledger(LIVE, 1)
  add_slots(row, row.slots)
  add_to_ledger(SWEPT, -row.tokens)
  add_to_ledger(REOPENED, 1)
end

-- Takes tokens and requests from the levels of the scopes of `row` that the call names; negative amounts are given
-- back. With `is_floored` no level sinks below 0, or further below 0.
local function charge(row, tokens, requests, is_floored)
  tokens, requests = tokens * UNIT, requests * UNIT
  for i = 1, scope_count do
    local scope = scopes[i]
    if row.scope_names == scope_names
      or string.find('\n' .. row.scope_names .. '\n', '\n' .. ARGV[2 + i] .. '\n', 1, true) then
      local level = min(scope.token_burst, scope.tokens - tokens)
      scope.tokens = is_floored and max(level, min(scope.tokens, 0)) or level
      level = min(scope.request_burst, scope.requests - requests)
      scope.requests = is_floored and max(level, min(scope.requests, 0)) or level
    end
  end
end

-- Returns the least request level, token level and number of free slots over all scopes of the call.
local function headroom()
  local requests, tokens, slots = huge, huge, huge
  for i = 1, scope_count do
    local scope = scopes[i]
    requests, tokens = min(requests, scope.requests), min(tokens, scope.tokens)
    slots = min(slots, scope.slots_max - scope.slots)
  end
  return requests, tokens, slots
end

-- Returns a level as an integer, or an empty text where it is not limited.
local function display(level)
  return level < huge and floor(level) or ''
end

-- Returns the headroom as three values of an answer.
local function remaining()
  local requests, tokens, slots = headroom()
  return display(requests), display(tokens), display(slots)
end

-- Writes the changed sums of scopes that the call does not name.
local function write_other_scopes()
  for name, by in pairs(other_scopes.slots) do
    if by ~= 0 then call('HINCRBY', OPEN, '#' .. name, by) end
  end
  for name, by in pairs(other_scopes.overrun) do
    local free_by = other_scopes.overrun_free[name] or 0
    if by ~= 0 or free_by ~= 0 then
      local tokens, free = unpack_overrun(call('HGET', OPEN, '#~' .. name))
      call('HSET', OPEN, '#~' .. name, pack_overrun(tokens + by, free + free_by))
    end
  end
end

-- Writes all changes. The commands that may fail come first, so that nothing has been written if one does.
local function write_changes()
  if other_scopes then write_other_scopes() end
  if rows_before == 0 or math.abs(now - ledger[LIFE_EXTENDED]) > LIFE_EXTENSION_MS then must_extend_life = true end
  if must_extend_life then add_to_ledger(LIFE_EXTENDED, now - ledger[LIFE_EXTENDED]) end
  if scope_count > 0 and must_write_levels then
    local fields = {}
    for i = 1, scope_count do
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
      leases[n + 1], leases[n + 2] = due_ms[rid], rid
      n = n + 2
    else
      gone = gone or {}
      gone[#gone + 1] = rid
    end
  end
  if n > 0 then call('ZADD', LEASES, unpack(leases)) end
  if must_write_ledger then
    ledger[EPOCH] = epoch
    fields[n + 1], fields[n + 2] = '+', pack(LEDGER_FORMAT .. 'd', unpack(ledger, 1, EPOCH))
    n = n + 2
  end
  for i = 1, scope_count do
    local scope = scopes[i]
    if scope.slots ~= (tonumber(values_read[1 + i]) or 0) then
      fields[n + 1], fields[n + 2] = fields_read[1 + i], scope.slots
      n = n + 2
    end
    if scope.overrun ~= scope.overrun_before or scope.overrun_free ~= scope.overrun_free_before then
      fields[n + 1], fields[n + 2] = fields_read[1 + scope_count + i], pack_overrun(scope.overrun, scope.overrun_free)
      n = n + 2
    end
  end
  if n > 0 then call('HSET', OPEN, unpack(fields)) end
  if gone then
    call('HDEL', OPEN, unpack(gone))
    call('ZREM', LEASES, unpack(gone))
  end
  if must_extend_life then
    for i = 1, 3 do call('PEXPIRE', KEYS[i], LIFE_MS) end
  end
end

-- Returns the index of the scope with the largest excess of open overrun over its limit, and by how much that overrun
-- must shrink; or nil, 0. If no request of a scope has open overrun, one request may open any amount. The free part
-- of quota leases does not count there: no request has it yet, and a later promise stays within the limit. A tenant
-- without open overrun is not refused for the overrun of other tenants of its organisation.
local function find_overrun_excess(overrun)
  if overrun == 0 then return nil, 0 end
  local index, excess, from = nil, 0, 1
  for i = 1, scope_count do
    if scopes[i].overrun <= scopes[i].overrun_free and sub(ARGV[2 + i], 1, 7) == 'tenant:' then from = i end
  end
  for i = from, scope_count do
    local scope = scopes[i]
    local more = min(scope.overrun - scope.overrun_free, math.ceil(scope.overrun + overrun - scope.overrun_max))
    if more > 0 and more >= excess then index, excess = i, more end
  end
  return index, excess
end

-- Returns the reason for which a request is refused (nil: admitted), the index of the scope, the Retry-After in ms
-- ('': not known, or never), 1 if a claim is the cause, and by how many tokens the open overrun must shrink.
local function find_denial(tokens, requests, slots, overrun)
  local reason, index, wait = nil, nil, 0
  tokens, requests = tokens * UNIT, requests * UNIT
  for i = 1, scope_count do
    local scope = scopes[i]
    if tokens > scope.token_burst or requests > scope.request_burst then reason, index = 'burst', i end
  end
  if reason then return reason, index, '', 0, 0 end
  local is_claimed = 0
  for i = 1, scope_count do
    local scope = scopes[i]
    if scope.requests < requests then
      local ms = math.ceil((requests - scope.requests) / scope.request_rate)
      if ms >= wait then reason, index, wait, is_claimed = 'requests', i, ms, 0 end
    end
    local ms, is_by_claim = 0, 0
    if scope.tokens < tokens then ms = math.ceil((tokens - scope.tokens) / scope.token_rate) end
    if tokens < scope.claim then
      is_by_claim = 1
      ms = max(ms, scope.claim_to - now)
    end
    if ms > 0 and ms >= wait then reason, index, wait, is_claimed = 'tokens', i, ms, is_by_claim end
  end
  if reason then return reason, index, wait, is_claimed, 0 end
  for i = 1, scope_count do
    local scope = scopes[i]
    if scope.slots + slots > scope.slots_max then reason, index = 'concurrency', i end
  end
  if reason then return reason, index, '', 0, 0 end
  local excess
  index, excess = find_overrun_excess(overrun)
  return index and 'overrun', index, '', 0, excess
end

-- Writes a claim on `scope` if the request is large enough and the pause after the last claim is over.
local function write_claim(scope, tokens, wait)
  if scope.claim == 0 and tokens > CLAIM_SHARE * scope.token_burst and now >= 2 * scope.claim_to - scope.claim_from then
    scope.claim, scope.claim_from = tokens, now
    scope.claim_to = now + wait + math.ceil(CLAIM_LATE * wait) + CLAIM_LATE_MS
    must_write_levels = true
  end
end

-- Runs the operations in order. All changes are written at the end.
local answers, must_write = {}, false
position = 3 + scope_count
while position <= #ARGV do
  local operation, numbers, rid, answer = ARGV[position], ARGV[position + 1], ARGV[position + 2], nil
  local rid_count = count_reservations(operation, numbers)

  if operation == 'reserve' then
    local tokens, requests, slots, overrun, lease, force = read('<dddddd', numbers)
    sweep(SWEEP_MAX)
    local is_repeated, reason, index, wait, is_claimed, excess = find(rid) ~= nil, nil, nil, nil, nil, nil
    if not is_repeated then
      if force == 0 then reason, index, wait, is_claimed, excess = find_denial(tokens, requests, slots, overrun) end
      if not reason then
        local row = new_row(tokens, requests, slots)
        set_overrun(row, overrun)
        charge(row, tokens, requests)
        add_to_ledger(RESERVED, tokens)
        write_row(rid, row, now + lease)
        must_write_levels = true
        for i = 1, scope_count do
          local scope = scopes[i]
          if scope.claim > 0 and tokens * UNIT >= scope.claim then scope.claim, scope.claim_to = 0, now end
        end
      end
    end
    if reason then
      local name = ARGV[2 + index]
      if reason == 'tokens' and is_claimed == 0 and sub(name, 1, 13) ~= 'organisation:' then
        write_claim(scopes[index], tokens * UNIT, wait)
      end
      answer = {'denied', reason, name, wait, is_claimed, excess, remaining()}
    else
      answer = {'granted', is_repeated and 1 or 0, remaining()}
    end

  elseif operation == 'settle' then
    local actual, used_requests = read('<dd', numbers)
    local row = find(rid)
    local state, refunded, overrun = 'settled', 0, 0
    if not row then
      state = 'unknown'
      write_tombstone(rid, {state = 's'}, true)
    elseif row.state == 's' then
      state = 'repeated'
    else
      local tokens = max(0, actual - row.used)
      overrun = max(0, tokens - row.tokens)
      if row.state == 'o' then
        refunded = max(0, row.tokens - tokens)
        local unused = used_requests < 0 and 0
          or min(row.requests, max(0, row.requests - max(0, used_requests - row.used_requests)))
        add_to_ledger(SETTLED, row.tokens - refunded)
        add_to_ledger(REFUNDED, refunded)
        charge(row, overrun - refunded, -unused)
        add_to_ledger(LIVE, -1)
        add_slots(row, -row.slots)
        set_overrun(row, 0)
      else
        state = 'late'
        charge(row, overrun, 0)
      end
      add_to_ledger(OVERRUN, overrun)
      write_tombstone(rid, {state = 's'})
    end
    must_write_levels = must_write_levels or state ~= 'repeated'
    answer = {state, refunded, overrun, remaining()}

  elseif operation == 'renew' then
    local lease, states = read('<d', numbers), {}
    for item = 1, rid_count do
      rid = ARGV[position + 1 + item]
      local tokens, requests, slots, extra, overrun = read('<ddddd', numbers, 40 * item - 31)
      local row, state = find(rid), 'renewed'
      if not row then
        state, row = 'recreated', new_row(tokens + extra, requests, slots)
        charge(row, tokens + extra, requests, true)
        add_to_ledger(RESERVED, tokens)
        add_to_ledger(EXTENDED, extra)
        add_to_ledger(RECREATED, 1)
      elseif row.state == 's' then
        state = 'settled'
      else
        if row.state == 'w' then
          state = 'reopened'
          reopen(row)
        end
        local growth = max(0, tokens + extra - row.tokens)
        row.tokens = row.tokens + growth
        charge(row, growth, 0)
        add_to_ledger(EXTENDED, growth)
      end
      if state ~= 'settled' then
        set_overrun(row, overrun)
        write_row(rid, row, now + lease)
      end
      states[item] = state
    end
    must_write_levels = true
    answer = {states, remaining()}

  elseif operation == 'lower' then
    local tokens = read('<d', numbers)
    local row, refunded = find(rid), 0
    if row and row.state ~= 's' then
      refunded = max(0, row.tokens - tokens)
      row.tokens = row.tokens - refunded
      charge(row, -refunded, 0)
      add_to_ledger(REFUNDED, refunded)
      if row.state == 'w' then add_to_ledger(SWEPT, -refunded) end
      set_overrun(row, 0)
      write_row(rid, row, due_ms[rid] or tonumber(call('ZSCORE', LEASES, rid) or now))
    end
    must_write_levels = true
    answer = {refunded, remaining()}

  elseif operation == 'draw' then
    local draw, lease, used, used_requests, tokens, requests, slots, open_tokens, least_tokens, least_slots, least_open =
      read('<ddddddddddd', numbers)
    sweep(SWEEP_MAX)
    local row = find(rid)
    if row and row.state == 's' then
      answer = {0, 0, 0, 0, 0, remaining()}
    else
      if not row then
        row = new_row(0, 0, 0)
        if draw > 1 then
          row.used, row.used_requests = used, used_requests
          add_to_ledger(RECREATED, 1)
        end
      end
      if row.state == 'w' then reopen(row) end
      if draw > row.drawn then
        row.drawn = draw
        local spent = max(0, used - row.used)
        local overrun = max(0, spent - row.tokens)
        add_to_ledger(SETTLED, spent - overrun)
        add_to_ledger(OVERRUN, overrun)
        charge(row, overrun, 0)
        row.tokens, row.used = row.tokens - spent + overrun, row.used + spent
        local admitted = max(0, used_requests - row.used_requests)
        row.requests, row.used_requests = max(0, row.requests - admitted), row.used_requests + admitted

        local free_requests, free_tokens, free_slots = headroom()
        local free_overrun = huge
        for i = 1, scope_count do
          if scopes[i].claim > 0 then free_tokens = 0 end
          free_overrun = min(free_overrun, floor(scopes[i].overrun_max - scopes[i].overrun))
        end
        local tokens_more = max(tokens, least_tokens) - row.tokens
        if tokens_more > 0 then
          tokens_more = max(min(tokens_more, max(0, floor(free_tokens / UNIT))), least_tokens - row.tokens)
          add_to_ledger(RESERVED, tokens_more)
        else
          add_to_ledger(REFUNDED, -tokens_more)
        end
        local requests_more = min(requests - row.requests, max(0, floor(free_requests / UNIT)))
        local slots_more = max(slots, least_slots) - row.slots
        if slots_more > 0 then slots_more = max(min(slots_more, max(0, free_slots)), least_slots - row.slots) end
        local overrun_more = max(open_tokens, least_open) - row.overrun
        if overrun_more > 0 then
          overrun_more = max(min(overrun_more, max(0, free_overrun)), least_open - row.overrun)
        end
        charge(row, tokens_more, requests_more)
        add_slots(row, slots_more)
        local overrun_then = row.overrun + overrun_more
        set_overrun(row, overrun_then, max(0, overrun_then - least_open))
        row.tokens, row.requests, row.slots =
          row.tokens + tokens_more, row.requests + requests_more, row.slots + slots_more
      end
      write_row(rid, row, now + lease)
      must_write_levels = true
      answer = {1, row.tokens, row.requests, row.slots, row.overrun, remaining()}
    end

  elseif operation == 'spend' then
    local tokens, requests = read('<dd', numbers)
    local is_repeated = rid ~= '' and find(rid) ~= nil
    if not is_repeated then
      charge({scope_names = scope_names}, tokens, requests, true)
      add_to_ledger(SPENT, tokens)
      if rid ~= '' then write_tombstone(rid, {state = 's'}, true) end
      must_write_levels = true
    end
    answer = {is_repeated and 1 or 0, remaining()}

  elseif operation == 'sweep' then
    local limit = read('<d', numbers)
    local swept, tokens, seen = sweep(limit)
    answer = {swept, tokens, seen < limit and 1 or 0}

  elseif operation == 'show' then
    local levels_now = {}
    for i = 1, scope_count do
      local scope = scopes[i]
      levels_now[i] = {display(scope.requests), display(scope.tokens), scope.slots, scope.overrun}
    end
    answer = {levels_now, {unpack(ledger, 1, ROWS)}}

  else
    return redis.error_reply('ERR unknown operation ' .. operation)
  end
  answers[#answers + 1] = answer
  position = position + 2 + rid_count
  must_write = must_write or operation ~= 'show'
end
if must_write then write_changes() end
return answers
