"""Several processes that train one model together, started by torchrun.

    torchrun --nproc-per-node 8 -m qkv train recipe.toml

`world` says who the processes are, `share` what each gets of a batch, `replicas`, `tensor` and `ring` how weights,
matrices and rows are divided, `sharded` what is saved then. `strategy` is what the trainer sees of all this. Every
process draws the same batches, and the loss of a step is one sum over all of them: its gradient is that of one process.
"""
