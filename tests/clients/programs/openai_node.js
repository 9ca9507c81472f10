// The openai package of npm. See tests/clients/openai_driver.py.
'use strict';

const readline = require('readline');
const OpenAI = require('openai');

function classesOf(error) {
  const found = [];
  for (let each = Object.getPrototypeOf(error); each && each !== Object.prototype; each = Object.getPrototypeOf(each)) {
    found.push(`openai.${each.constructor.name}`);
  }
  return found;
}

const usageOf = (usage) => (usage ? [usage.prompt_tokens, usage.completion_tokens] : null);

async function ask(command) {
  const client = new OpenAI({ baseURL: command.base_url, apiKey: command.api_key });
  const body = { model: command.model, messages: command.messages, ...command.parameters, ...command.extra };
  if (!command.streams) {
    const answer = await client.chat.completions.create(body);
    const choice = answer.choices[0];
    return { text: choice.message.content, finish_reason: choice.finish_reason, usage: usageOf(answer.usage) };
  }
  const aborting = new AbortController();
  const stream = await client.chat.completions.create(
    { ...body, stream: true, stream_options: { include_usage: true } },
    { signal: aborting.signal },
  );
  const seen = { text: '', finish_reason: null, usage: null, chunk_count: 0 };
  for await (const chunk of stream) {
    seen.usage = usageOf(chunk.usage) || seen.usage;
    for (const choice of chunk.choices) {
      if (choice.delta.content) {
        seen.text += choice.delta.content;
        seen.chunk_count += 1;
      }
      seen.finish_reason = choice.finish_reason || seen.finish_reason;
    }
    if (command.leave_after && seen.chunk_count >= command.leave_after) aborting.abort();
  }
  return seen;
}

async function helper(command) {
  // `chat.completions.stream` gathers the chunks to a whole completion.
  const client = new OpenAI({ baseURL: command.base_url, apiKey: command.api_key });
  const runner = client.chat.completions.stream({
    model: command.model, messages: command.messages, ...command.parameters, ...command.extra,
    stream_options: { include_usage: true },
  });
  let count = 0;
  runner.on('content', () => {
    count += 1;
    if (command.leave_after && count >= command.leave_after) runner.abort();
  });
  try {
    const answer = await runner.finalChatCompletion();
    const choice = answer.choices[0];
    return {
      text: choice.message.content, finish_reason: choice.finish_reason, usage: usageOf(answer.usage), chunk_count: count,
    };
  } catch (error) {
    if (error instanceof OpenAI.APIUserAbortError) return { text: '', chunk_count: count };
    throw error;
  }
}

async function parse(command) {
  const client = new OpenAI({ baseURL: command.base_url, apiKey: command.api_key });
  const schema = {
    type: 'object',
    properties: { name: { type: 'string' }, dark: { type: 'boolean' } },
    required: ['name', 'dark'],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.parse({
    model: command.model, messages: command.messages, ...command.parameters,
    response_format: { type: 'json_schema', json_schema: { name: 'colour', strict: true, schema } },
  });
  return { text: answer.choices[0].message.content, parsed: JSON.parse(answer.choices[0].message.content) };
}

async function turns(command) {
  // A second turn with the message objects of two first answers: that of `create`, and that of `stream`.
  const client = new OpenAI({ baseURL: command.base_url, apiKey: command.api_key });
  const first = { model: command.model, messages: command.messages, ...command.parameters };
  const created = await client.chat.completions.create(first);
  const streamed = await client.chat.completions.stream(first).finalChatCompletion();
  const texts = [];
  let last;
  for (const { message } of [created.choices[0], streamed.choices[0]]) {
    const messages = [...command.messages, message, { role: 'user', content: command.next }];
    last = await client.chat.completions.create({ ...first, messages });
    texts.push(last.choices[0].message.content);
  }
  if (texts[0] !== texts[1]) throw new Error(`the answers differ: ${texts}`);
  return { text: texts[0], finish_reason: last.choices[0].finish_reason, usage: usageOf(last.usage) };
}

const WAYS = { create: ask, stream: helper, parse, turns };

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const command = JSON.parse(line);
    let seen;
    try {
      seen = await WAYS[command.way](command);
    } catch (error) {
      seen = {
        error: {
          classes: classesOf(error), status: error.status ?? null, code: error.code ?? null, param: error.param ?? null,
          message: String(error).slice(0, 600),
        },
      };
    }
    process.stdout.write(`${JSON.stringify(seen)}\n`);
  }
}

main();
