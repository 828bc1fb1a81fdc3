"""Small networks of predictors: ONNX graphs, computed by compiled kernels or by onnxruntime."""
