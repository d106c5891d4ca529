out_dir = "out-small"
max_iters = 20
n_embd = 16
