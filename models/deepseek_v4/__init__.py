"""DeepSeek-V4 decoding, a file for each part named in its paper."""
