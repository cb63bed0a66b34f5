"""A real model, speculating: python examples/quickstart.py"""

import speccompile
from speccompile import pretrained

model, tokenizer = pretrained.load("smollm2")  # or a local folder, or a hub id
spec = speccompile.wrap(model, mode="ngram", max_len=1024)

text = "Speculative decoding drafts several tokens and verifies them in one pass. The text stays the same."
chat = [{"role": "user", "content": f"Repeat this text word by word: {text}"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
ids = spec.generate(**inputs, max_new_tokens=64)

print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"{spec.stats.acceptance_length:.2f} tokens a target pass")
