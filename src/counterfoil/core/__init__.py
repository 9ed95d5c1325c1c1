"""The ground floor: errors, configuration, registry, progress, processes, files and tensors."""
