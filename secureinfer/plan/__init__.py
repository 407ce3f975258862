"""From a Graph to a Plan (kernels and costs) and to a Program that parties compare and run."""
