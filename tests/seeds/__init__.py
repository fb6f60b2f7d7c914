"""The two seed texts made executable: their listings as they stand, and what holds and fails in them."""
