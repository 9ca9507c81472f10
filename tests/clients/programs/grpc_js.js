// The client on @grpc/grpc-js. See tests/clients/driver.py.
'use strict';

const fs = require('fs');
const readline = require('readline');
const grpc = require('@grpc/grpc-js');

const GZIP = 2;
const same = (bytes) => bytes;
const clients = new Map();

function clientOf(command) {
  if (!clients.has(command.channel)) {
    const options = { 'grpc.use_local_subchannel_pool': 1 };
    let credentials = grpc.credentials.createInsecure();
    if (command.tls) {
      const read = (name) => (command.tls[name] ? fs.readFileSync(command.tls[name]) : null);
      credentials = grpc.credentials.createSsl(read('authority'), read('key'), read('certificate'));
      options['grpc.ssl_target_name_override'] = command.tls.name;
      options['grpc.default_authority'] = command.tls.name;
    }
    if (command.gzip) options['grpc.default_compression_algorithm'] = GZIP;
    clients.set(command.channel, new grpc.Client(command.target, credentials, options));
  }
  return clients.get(command.channel);
}

function metadataOf(command) {
  const metadata = new grpc.Metadata();
  for (const [key, value] of command.metadata) metadata.add(key, value);
  return metadata;
}

function trailersOf(metadata) {
  const found = {};
  for (const key of Object.keys(metadata.getMap())) {
    const [value] = metadata.get(key);
    found[key] = Buffer.isBuffer(value) ? value.toString('base64') : value;
  }
  return found;
}

function call(command, begin) {
  return new Promise((resolve) => {
    const request = Buffer.from(command.request, 'base64');
    const options = {};
    if (command.deadline_s !== null) options.deadline = Date.now() + command.deadline_s * 1000;
    const messages = [];
    let count = 0, gap = 0, last = 0;
    const take = (message) => {
      const now = performance.now() / 1000;
      if (count > 0) gap = Math.max(gap, now - last);
      last = now;
      count += 1;
      if (!command.is_brief) messages.push(message.toString('base64'));
    };
    const end = (status) => resolve({
      code: status.code, details: status.details, trailers: trailersOf(status.metadata), messages,
      message_count: count, gap_s: gap,
    });
    const client = clientOf(command);
    if (!command.streams) {
      let status = null;
      const unary = client.makeUnaryRequest(command.path, same, same, request, metadataOf(command), options,
        (error, message) => { if (!error) take(message); setImmediate(() => end(status || error)); });
      unary.on('status', (found) => { status = found; });
      return;
    }
    const stream = client.makeServerStreamRequest(command.path, same, same, request, metadataOf(command), options);
    stream.on('data', (message) => {
      take(message);
      begin();
      if (count === command.cancel_after) stream.cancel();
    });
    stream.on('error', () => {});
    stream.on('status', end);
  });
}

readline.createInterface({ input: process.stdin }).on('line', async (line) => {
  const command = JSON.parse(line);
  let begun = false;
  const say = (fields) => process.stdout.write(JSON.stringify({ id: command.id, ...fields }) + '\n');
  const begin = () => { if (!begun) { begun = true; say({ first: true }); } };
  const calls = [];
  for (let number = 0; number < command.count; number += 1) calls.push(call(command, begin));
  say({ outcomes: await Promise.all(calls) });
}).on('close', () => process.exit(0));
