-- name: limit
-- How long the statements of a session may wait for locks, and run. Only where it is this connection's
-- own: behind a pooler the next client inherits it, and an application's report would be cut short.
SELECT set_config('lock_timeout',
                  coalesce(%(lock_timeout)s, current_setting('lock_timeout')), false),
       set_config('statement_timeout',
                  coalesce(%(statement_timeout)s, current_setting('statement_timeout')), false)
 WHERE pg_backend_pid() = %(backend_pid)s
