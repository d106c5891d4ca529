import os
import pickle

import numpy as np

here = os.path.dirname(__file__)
text = "to be or not to be " * 200
chars = sorted(set(text))
ids = np.array([chars.index(c) for c in text], dtype=np.uint16)
ids.tofile(os.path.join(here, "train.bin"))
with open(os.path.join(here, "meta.pkl"), "wb") as f:
    pickle.dump({"vocab_size": len(chars)}, f)
