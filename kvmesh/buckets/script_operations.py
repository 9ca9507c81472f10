"""The part of the script that does the operations, one after the other: see script.

Pure: text alone. Each piece but the first is another branch of the same choice.
"""

from __future__ import annotations

from typing import Final

RESERVE: Final = """
-- Returns the scope whose open overrun would exceed its limit, and by how much it must shrink. Where no request of a scope
-- has any open, one may open any: what slabs hold free is not open to a request yet, and what they promise later is within
-- the limit. A tenant with none is not refused for what others of its organisation have open.
local function overrunning(overrun)
  if overrun == 0 then return nil, 0 end
  local place, excess, from = nil, 0, 1
  for i = 1, count do
    if scopes[i].overrun <= scopes[i].overrun_free and sub(ARGV[2 + i], 1, 7) == 'tenant:' then from = i end
  end
  for i = from, count do
    local scope = scopes[i]
    local more = min(scope.overrun - scope.overrun_free, math.ceil(scope.overrun + overrun - scope.overrun_max))
    if more > 0 and more >= excess then place, excess = i, more end
  end
  return place, excess
end

-- Returns why a request is refused, by which scope, how many ms it should wait ('': not known, or never), whether for a
-- claim, and by how many tokens the open overrun must shrink.
local function judge(tokens, requests, slots, overrun)
  local reason, place, wait = nil, nil, 0
  tokens, requests = tokens * UNIT, requests * UNIT
  for i = 1, count do
    local scope = scopes[i]
    if tokens > scope.token_burst or requests > scope.request_burst then reason, place = 'burst', i end
  end
  if reason then return reason, place, '', 0, 0 end
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
  if reason then return reason, place, wait, is_claimed, 0 end
  for i = 1, count do
    local scope = scopes[i]
    if scope.slots + slots > scope.slots_max then reason, place = 'concurrency', i end
  end
  if reason then return reason, place, '', 0, 0 end
  local excess
  place, excess = overrunning(overrun)
  return place and 'overrun', place, '', 0, excess
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
  local tokens, requests, slots, overrun, lease, force = read('<dddddd', numbers)
  sweep(SWEEP_MAX)
  local is_repeated, reason, place, wait, is_claimed, excess = find(rid) ~= nil, nil, nil, nil, nil, nil
  if not is_repeated then
    if force == 0 then reason, place, wait, is_claimed, excess = judge(tokens, requests, slots, overrun) end
    if not reason then
      local row = new_row(tokens, requests, slots)
      open(row, overrun)
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
    answer = {'denied', reason, name, wait, is_claimed, excess, remaining()}
  else
    answer = {'granted', is_repeated and 1 or 0, remaining()}
  end
"""

SETTLE: Final = """
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
      open(row, 0)
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

RENEW: Final = """
elseif operation == 'renew' then
  local lease, states = read('<d', numbers), {}
  for item = 1, names do
    rid = ARGV[at + 1 + item]
    local tokens, requests, slots, extra, overrun = read('<ddddd', numbers, 40 * item - 31)
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
    if state ~= 'settled' then
      open(row, overrun)
      put(rid, row, now + lease)
    end
    states[item] = state
  end
  must_level = true
  answer = {states, remaining()}
"""

LOWER: Final = """
elseif operation == 'lower' then
  local tokens = read('<d', numbers)
  local row, refunded = find(rid), 0
  if row and row.state ~= 's' then
    refunded = max(0, row.tokens - tokens)
    row.tokens = row.tokens - refunded
    take(row, -refunded, 0)
    add(REFUNDED, refunded)
    if row.state == 'w' then add(SWEPT, -refunded) end
    open(row, 0)
    put(rid, row, ends[rid] or tonumber(call('ZSCORE', LEASES, rid) or now))
  end
  must_level = true
  answer = {refunded, remaining()}
"""

DRAW: Final = """
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
      local free_overrun = huge
      for i = 1, count do
        if scopes[i].claim > 0 then free_tokens = 0 end
        free_overrun = min(free_overrun, floor(scopes[i].overrun_max - scopes[i].overrun))
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
      local o = max(open_tokens, least_open) - row.overrun
      if o > 0 then o = max(min(o, max(0, free_overrun)), least_open - row.overrun) end
      take(row, t, r)
      hold(row, s)
      local overrun = row.overrun + o
      open(row, overrun, max(0, overrun - least_open))
      row.tokens, row.requests, row.slots = row.tokens + t, row.requests + r, row.slots + s
    end
    put(rid, row, now + lease)
    must_level = true
    answer = {1, row.tokens, row.requests, row.slots, row.overrun, remaining()}
  end
"""

REST: Final = """
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
    uses[i] = {shown(scope.requests), shown(scope.tokens), scope.slots, scope.overrun}
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
