-- The last position of a stream's log, without sending the entry itself.
-- KEYS: log. Replies the position, or nil where the log is empty or ends with a foreign id.
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if #tail == 0 then return false end
return string.match(tail[1][1], '^(%d+)%-0$')
