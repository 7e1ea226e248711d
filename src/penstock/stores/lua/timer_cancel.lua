-- Removes one timer, or all of a topic's, with everything that is known of them in one step.
-- KEYS: timeline, payloads, state. ARGV: id, or none for all. Returns how many there were.

if #ARGV == 1 then
  -- Its payload after its state, which may be refused: a timer that stays has to keep it.
  redis.call('HDEL', KEYS[3], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
  return redis.call('ZREM', KEYS[1], ARGV[1])
end
local count = redis.call('ZCARD', KEYS[1])
-- Not DEL: freeing a million timers would stop the server for a while.
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
return count
