"""``mpdp bench faults``: break a short training in every way that is known, and look at how it ends.

Read ``kinds`` for what is broken and what has to come of it, ``training`` for the program that breaks, ``jobs`` for how
it is started and watched, ``trial`` for one fault from its injection to the resumed run, ``command`` for the rounds.
"""
