"""The APIs that programs speak, each as an object that parses requests and writes responses."""
