"""Trains a Hugging Face model with Trainer while its layers live on a daemon.

    python3 examples/transformers_trainer.py   (ATTND_ADDRESS: the daemon's address; default 127.0.0.1:7070)

The model is small and has random weights, so nothing is downloaded; any model with layers of a supported class will do.
"""
import os
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import attnd.torch
import attnd.transformers

torch.manual_seed(1)
model = BertForSequenceClassification(BertConfig(
    vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=2))
rows = torch.randint(2, 32, (512, 16))
rows[torch.arange(0, 512, 2), torch.randint(16, (256,))] = 1  # the task: does symbol 1 occur?
samples = [{"input_ids": row, "labels": (row == 1).any().long()} for row in rows]

attnd.transformers.offload(model, os.environ.get("ATTND_ADDRESS", "127.0.0.1:7070"))
optimizer = attnd.torch.optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(output_dir=folder, per_device_train_batch_size=32, num_train_epochs=4, logging_steps=16,
                                use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no")
    trainer = Trainer(model=model, args=options, train_dataset=samples, optimizers=(optimizer, None))
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss: {float(losses[0]):.3f} in the first 16 steps, {float(losses[-1]):.3f} in the last 16")
