"""What everything else stands on: trees, settings, files, logging, graphs."""
