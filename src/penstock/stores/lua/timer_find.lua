-- One timer as of one moment.
-- KEYS: timeline, payloads, state. ARGV: id. Returns score, state, payload; nothing for none.

local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not score then return {} end
return {
  score,
  redis.call('HGET', KEYS[3], ARGV[1]) or '',
  redis.call('HGET', KEYS[2], ARGV[1]) or '',
}
