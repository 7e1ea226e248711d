-- The last position of a stream's log, without sending the entry itself. Its publisher asks with its
-- term, by which it is seen to be alive.
-- KEYS: log, meta. ARGV: term or 0.
-- Replies the position, or nil where the log is empty or ends with a foreign id.
if ARGV[1] ~= '0' and redis.call('HGET', KEYS[2], 'term') == ARGV[1] then
  redis.call('HSET', KEYS[2], 'seen', redis.call('TIME')[1])
end
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if #tail == 0 then return false end
return string.match(tail[1][1], '^(%d+)%-0$')
