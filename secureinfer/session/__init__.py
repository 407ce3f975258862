"""Sessions: the handshake, one worker process for each party, each role's state machine, and the caller's
side.
"""
