"""Export of a model as a GGUF file, which llama.cpp and what is built on it open."""
