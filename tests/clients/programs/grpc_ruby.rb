# The client on the gem grpc, with a thread for each call. See tests/clients/driver.py.
require 'base64'
require 'grpc'
require 'json'
require 'thread'

SAME = ->(bytes) { bytes }
LOCK = Mutex.new
$stdout.sync = true
$stubs = {}

def say(number, fields)
  line = JSON.generate({ 'id' => number }.merge(fields))
  LOCK.synchronize { $stdout.puts(line) }
end

def clock
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

def stub_of(command)
  $stubs[command['channel']] ||= begin
    options = { 'grpc.use_local_subchannel_pool' => 1 }
    options.merge!(GRPC::Core::CompressionOptions.new(default_algorithm: :gzip).to_channel_arg_hash) if command['gzip']
    credentials = :this_channel_is_insecure
    if (tls = command['tls'])
      options['grpc.ssl_target_name_override'] = tls['name']
      read = ->(name) { tls[name].empty? ? nil : File.read(tls[name]) }
      credentials = if tls['key'].empty?
                      GRPC::Core::ChannelCredentials.new(read['authority'])
                    else
                      GRPC::Core::ChannelCredentials.new(read['authority'], read['key'], read['certificate'])
                    end
    end
    GRPC::ClientStub.new(command['target'], credentials, channel_args: options)
  end
end

def call(command, stub, start)
  messages = []
  count = 0
  gap = 0.0
  last = 0.0
  take = lambda do |message|
    now = clock
    gap = [gap, now - last].max if count.positive?
    last = now
    count += 1
    messages << Base64.strict_encode64(message) unless command['is_brief']
  end
  code = 0
  details = ''
  trailers = {}
  operation = nil
  begin
    request = Base64.decode64(command['request'])
    options = { return_op: true, metadata: command['metadata'].to_h }
    options[:deadline] = Time.now + command['deadline_s'] if command['deadline_s']
    if command['streams']
      operation = stub.server_streamer(command['path'], request, SAME, SAME, **options)
      operation.execute.each do |message|
        take[message]
        start.call
        operation.cancel if count == command['cancel_after']
      end
    else
      operation = stub.request_response(command['path'], request, SAME, SAME, **options)
      take[operation.execute]
    end
    trailers = operation.trailing_metadata || {}
  rescue GRPC::BadStatus => e
    code = e.code
    details = e.details.dup.force_encoding('UTF-8').scrub
    trailers = e.metadata || {}
  end
  trailers = trailers.to_h { |key, value| [key, key.end_with?('-bin') ? Base64.strict_encode64(value) : value] }
  { 'code' => code, 'details' => details, 'messages' => messages, 'trailers' => trailers, 'message_count' => count,
    'gap_s' => gap }
end

def run(command, stub)
  begun = false
  start = lambda do
    unless begun
      begun = true
      say(command['id'], 'first' => true)
    end
  end
  threads = Array.new(command['count']) { Thread.new { call(command, stub, start) } }
  say(command['id'], 'outcomes' => threads.map(&:value))
end

$stdin.each_line do |line|
  command = JSON.parse(line)
  stub = stub_of(command)
  Thread.new { run(command, stub) }
end
