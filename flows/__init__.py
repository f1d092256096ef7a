from tasks.secrets import watch_logs

watch_logs()
