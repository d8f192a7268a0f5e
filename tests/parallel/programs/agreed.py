"""Every rank makes the same mistake and none catches the error."""

import numpy as np

import mpdp
from mpdp import data, nn, optim

trainer = mpdp.Trainer(nn.Linear(2, 2), nn.cross_entropy, optim.SGD(lr=0.1))
trainer.fit(data.ArrayDataset(np.zeros((4, 2), "float32"), np.zeros(4, int)), epochs=1, global_batch_size=0)
