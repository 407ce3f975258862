"""One BERT classifier under every engine that can run it in private, in turns on one machine: `python -m benchmarks peers`.

In the order of what needs what: digest, child (a peer's side of the turns), crypten_stock and spu_semi2k (the peers, which
import nothing of secureinfer), case, row, engines, picture, command.
"""
