"""A family of diffusion models: AuraFlow (``AuraFlowPipeline``), a flow model with one T5. See docs/families.md."""

from mmrl.pipelines.diffusion import loading
from mmrl.pipelines.diffusion.adapter import Adapter


class AuraFlowAdapter(Adapter):
    family = "AuraFlow"
    pipeline = "AuraFlowPipeline"
    encoders = ("text_encoder",)
    lora_targets = ("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0")

    def encode(self, text):
        embeds, *_ = self.pipe.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            device=self.text_encoders[0].device,
            max_sequence_length=self.sampling.max_sequence_length,
        )
        return {"embeds": embeds[0].to(self.device)}

    def latent_shape(self, height, width):
        self._fits(height, width, 2 * self.pipe.vae_scale_factor)
        factor = self.pipe.vae_scale_factor
        return (self.pipe.transformer.config.in_channels, height // factor, width // factor)

    def predict(self, model, x, timestep, features):
        embeds = features["embeds"]
        return model(x.to(embeds.dtype), embeds, timestep.to(embeds.dtype) / 1000, return_dict=False)[0]

    def call(self):
        return super().call() | {"max_sequence_length": self.sampling.max_sequence_length}


build, describe = loading.entry_points(AuraFlowAdapter)
