"""The command line: ``mpdp`` and its sub-commands. Parses before anything heavy is imported."""
