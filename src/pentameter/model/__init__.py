"""The GPT: plain, sliceable by layers, with keyed initial weights and keyed dropout."""
