"""One test per fact: a row of the table of facts, an entry of the list of errata, a bug of another implementation.

A test is named after its row (`test_sinusoidal_position_encoding`), entry (`test_e03_...`) or bug (`test_b48_...`).
`ledger` says for every row which tests show it, and which part of qkv still owes the rest.
"""
