-- Settles what one execution reports: charges the tokens of its request that no report has charged before.
--
-- A report has the totals of the whole request. The record keeps the highest totals, so each token is charged once.
-- The charge does not depend on the order of the reports. A successor, which continued the output of an earlier
-- execution, pays neither for that output nor for the prompt. If the successor reports first, it leaves these tokens
-- to its predecessors, and their reports take them. An execution that never reports has died; the frontend of the
-- successor charges its reservation (see charge_split.py). The functions that read and extend the executions stand in
-- begin_execution.lua, too.
--
-- KEYS: 1 the request. ARGV: 1 epoch, 2 owner, 3 tokens of the prompt, 4 tokens of the output, 5 how many executions
-- the request may have after its good end, or empty, 6 life of the record in ms, 7 output inherited.
--
-- Returns SETTLED, or SUPERSEDED if a later execution is known; the tokens of prompt and output that were not settled
-- before; the tokens of prompt and output that the execution pays.

-- Indices of an execution in the JSON of field `runs`, which lists the executions of a request by epoch. INHERITED:
-- output of earlier executions that it continued. PREDECESSOR: epoch of the execution that gave that output, or -1.
-- REPORTED: 1 or 0. PROMPT, OUTPUT: the tokens that it paid; before its report, the tokens that others left for it.
-- PROMPT_ADDED, OUTPUT_ADDED: the tokens that its report added to the request.
local OWNER, EPOCH, INHERITED, PREDECESSOR, REPORTED = 1, 2, 3, 4, 5
local PROMPT, OUTPUT, PROMPT_ADDED, OUTPUT_ADDED = 6, 7, 8, 9

-- Returns the executions of a request. The last one is added if `text` lacks it: an older release writes only the
-- `owner` of the last execution that began, and the `settler`, the owner of the last one that reported.
local function read_executions(text, epoch, owner, settler, prompt, output)
  local executions, last_owner = text and cjson.decode(text) or {}, owner or settler
  if not last_owner then return executions end
  for _, execution in ipairs(executions) do
    if execution[OWNER] == last_owner then return executions end
  end
  local reported = last_owner == settler and 1 or 0
  prompt, output = reported * tonumber(prompt or '0'), reported * tonumber(output or '0')
  executions[#executions + 1] = {last_owner, tonumber(epoch or '0'), 0, -1, reported, prompt, output, prompt, output}
  return executions
end

-- Inserts an execution that has not reported, in the order of epochs, and returns its index.
local function insert_execution(executions, owner, epoch, inherited, predecessor)
  local index = #executions + 1
  while index > 1 and executions[index - 1][EPOCH] > epoch do index = index - 1 end
  table.insert(executions, index, {owner, epoch, inherited, predecessor, 0, 0, 0, 0, 0})
  return index
end

-- Inserts the predecessor where the request has no execution as early. An execution that took no number from Redis
-- has the owner '' until it reports.
local function ensure_predecessor(executions, predecessor)
  if predecessor >= 0 and not (executions[1] and executions[1][EPOCH] <= predecessor) then
    insert_execution(executions, '', predecessor, 0, -1)
  end
end

local record = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'settler', 'prompt', 'output', 'prompt_last', 'output_last',
  'runs')
local epoch, owner, inherited, status = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[7]), 'SETTLED'
if record[1] and tonumber(record[1]) > epoch and record[2] ~= owner then status = 'SUPERSEDED' end
local prompt, output = tonumber(record[4] or '0'), tonumber(record[5] or '0')
local prompt_total, output_total = math.max(prompt, tonumber(ARGV[3])), math.max(output, tonumber(ARGV[4]))
local prompt_added, output_added = prompt_total - prompt, output_total - output
local prompt_paid, output_paid = prompt_added, output_added
local executions = nil
if record[8] or inherited > 0 or record[3] then
  executions = read_executions(record[8], record[1], record[2], record[3], record[6], record[7])
  -- An execution without a number is in the record under its epoch, with no owner.
  local own_index = nil
  for index, execution in ipairs(executions) do
    if execution[OWNER] == owner then own_index = index end
  end
  for index, execution in ipairs(own_index and {} or executions) do
    if execution[OWNER] == '' and execution[EPOCH] == epoch then own_index = index end
  end
  local execution = executions[own_index or insert_execution(executions, owner, epoch, inherited, epoch - 1)]
  -- A repeated report gets the same answer.
  if execution[REPORTED] == 1 then
    return {status, execution[PROMPT_ADDED], execution[OUTPUT_ADDED], execution[PROMPT], execution[OUTPUT]}
  end
  execution[OWNER], execution[INHERITED] = owner, inherited
  if inherited > 0 then
    if execution[PREDECESSOR] < 0 then execution[PREDECESSOR] = epoch - 1 end
    ensure_predecessor(executions, execution[PREDECESSOR])
  end

  -- Inherited output that no report has covered is left to the executions that gave it. An execution that has
  -- reported already takes nothing more, so this one pays its share.
  local unassigned, predecessor = math.min(inherited, output_total), execution[PREDECESSOR]
  local first = inherited == 0 and execution or nil
  output_paid = execution[OUTPUT] + output_total - math.min(output_total, math.max(output, inherited))
  local index = #executions
  while executions[index] ~= execution do index = index - 1 end
  while not first and index > 1 do
    index = index - 1
    local earlier = executions[index]
    if earlier[EPOCH] <= predecessor then
      local share = math.max(0, unassigned - math.max(output, earlier[INHERITED]))
      if earlier[REPORTED] == 0 then
        earlier[OUTPUT] = earlier[OUTPUT] + share
      else
        output_paid = output_paid + share
      end
      unassigned, predecessor = unassigned - share, math.min(predecessor, earlier[PREDECESSOR])
      if earlier[INHERITED] == 0 then first = earlier end
    end
  end
  output_paid, prompt_paid = output_paid + math.max(0, unassigned - output) * (first and 0 or 1), execution[PROMPT]
  -- The first execution pays for the prompt, or this one if the first has reported or is not known.
  first = first or execution
  if first ~= execution and first[REPORTED] == 0 then
    first[PROMPT] = first[PROMPT] + prompt_added
  else
    prompt_paid = prompt_paid + prompt_added
  end
  execution[REPORTED], execution[PROMPT], execution[OUTPUT] = 1, prompt_paid, output_paid
  execution[PROMPT_ADDED], execution[OUTPUT_ADDED] = prompt_added, output_added
end
redis.call('HSET', KEYS[1], 'epoch', math.max(epoch, tonumber(record[1] or '0')), 'settler', owner,
  'prompt', prompt_total, 'output', output_total, 'prompt_last', prompt_added, 'output_last', output_added)
if executions then redis.call('HSET', KEYS[1], 'runs', cjson.encode(executions)) end
redis.call('HDEL', KEYS[1], 'given:' .. owner)
if ARGV[5] ~= '' and status == 'SETTLED' then redis.call('HSETNX', KEYS[1], 'again', ARGV[5]) end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return {status, prompt_added, output_added, prompt_paid, output_paid}
