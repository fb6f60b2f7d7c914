"""The executable textbook: experiments that hold what the teaching texts say against measurements."""
