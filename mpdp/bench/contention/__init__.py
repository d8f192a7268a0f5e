"""``mpdp bench contention``: threads against processes, measured on this machine; read ``command`` first."""
