"""Inputs of prompts beside their tokens: images and video frames, as the model's own code embeds them."""
