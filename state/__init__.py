"""What training is: immutable records, and the words for trees of tensors."""
