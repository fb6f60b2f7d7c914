"""The seeds' own code, one module per listing, with the indentation put back and nothing repaired.

`s0_*` is lecture 3 (architecture and hyperparameters), `s1_*` is "Transformer architecture in detail". Comments are
shortened and translated. Code that stood at module level is in a function `demo`, which returns what the seed
printed; nothing prints or draws a random number on import. Each docstring names the section and the entries (E..) of
the errata that touch the listing. A listing that is broken stays broken here: the tests assert how it fails.
"""
