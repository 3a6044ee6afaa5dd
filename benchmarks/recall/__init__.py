"""Key-value recall: a small trained model that shows what a compressed cache has lost, without any download."""
