-- Gives a new execution of a request its number, the epoch, and announces it. Earlier executions end when they hear
-- of it.
--
-- The record of a request is a hash that expires. The functions that read and extend its executions stand in
-- settle_execution.lua, too.
--
-- KEYS: 1 the request. ARGV: 1 the least epoch, 2 digest of all that shapes the output, 3 seed, 4 "1" if the client
-- gave the seed, 5 owner, 6 the highest epoch, 7 life of the record in ms, 8 channel, 9 request id, 10 output
-- inherited, 11 epoch of the predecessor, or -1, 12 "1" if the client's token is older than a record may be,
-- 13 pool that the execution claims, or '' in a mesh with one pool, 14 pool of a record that has none, 15 claimed pool
-- that the new one replaces, or '*' for any, 16 digest of the request before its tokenizing, or '', 17 "1" if the
-- request must have a record.
--
-- Returns RUN, the epoch and the seed of the new execution. Then follow owner, epoch, output inherited and output
-- given of each earlier execution that has not reported, from the predecessor on. UNSHOWN instead of RUN: the record
-- does not reach back to the predecessor of an old token, so nothing is inherited. DIFFERS: the record is of another
-- request. ENDED: the request may not run again. UNKNOWN: it must have a record, and has none.
-- POOL and a name: an earlier execution claimed that pool. The first claim of a request lasts as long as its record.

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

local record = redis.call('HMGET', KEYS[1], 'epoch', 'digest', 'seed', 'again',
  'runs', 'owner', 'settler', 'prompt_last', 'output_last', 'pool', 'asked')
if ARGV[17] == '1' and not record[1] then return {'UNKNOWN'} end
local epoch, seed = tonumber(ARGV[1]), ARGV[3]
local pool, is_moved = ARGV[13], false
if pool ~= '' and (record[1] or record[10]) then
  local claimed = record[10] or ARGV[14]
  is_moved = claimed ~= pool
  if is_moved and ARGV[15] ~= claimed and ARGV[15] ~= '*' then return {'POOL', claimed} end
end
if record[1] then
  -- Another version may have another tokenizer, and so another digest of an equal request.
  if is_moved then
    if record[11] and ARGV[16] ~= '' and record[11] ~= ARGV[16] then return {'DIFFERS'} end
  elseif record[2] and record[2] ~= ARGV[2] then return {'DIFFERS'} end
  if record[3] then
    if ARGV[4] == '1' and record[3] ~= seed then return {'DIFFERS'} end
    seed = record[3]
  end
  if record[4] and tonumber(record[4]) <= 0 then return {'ENDED'} end
  epoch = math.max(epoch, tonumber(record[1]) + 1)
end
if epoch > tonumber(ARGV[6]) then return {'ENDED'} end
if record[4] then redis.call('HINCRBY', KEYS[1], 'again', -1) end
redis.call('HSET', KEYS[1], 'epoch', epoch, 'digest', ARGV[2], 'seed', seed, 'owner', ARGV[5])
if pool ~= '' then redis.call('HSET', KEYS[1], 'pool', pool) end
if ARGV[16] ~= '' then redis.call('HSET', KEYS[1], 'asked', ARGV[16]) end
redis.call('PEXPIRE', KEYS[1], ARGV[7])
if epoch > 0 then redis.call('PUBLISH', ARGV[8], ARGV[9] .. ' ' .. epoch .. ' ' .. ARGV[5]) end
local inherited, predecessor, answer = tonumber(ARGV[10]), tonumber(ARGV[11]), {'RUN', epoch, seed}
local executions = read_executions(record[5], record[1], record[6], record[7], record[8], record[9])
if ARGV[12] == '1' and not (executions[1] and executions[1][EPOCH] <= predecessor) then
  inherited, predecessor, answer[1] = 0, -1, 'UNSHOWN'
end
ensure_predecessor(executions, predecessor)
if #executions == 0 then return answer end
for _, execution in ipairs(executions) do
  if execution[REPORTED] == 0 and execution[EPOCH] >= predecessor then
    local given = redis.call('HGET', KEYS[1], 'given:' .. execution[OWNER])
    for _, value in ipairs({execution[OWNER], execution[EPOCH], execution[INHERITED], given or 0}) do
      answer[#answer + 1] = value
    end
  end
end
insert_execution(executions, ARGV[5], epoch, inherited, predecessor)
redis.call('HSET', KEYS[1], 'runs', cjson.encode(executions))
return answer
