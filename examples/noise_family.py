"""A family that predicts noise: PixArt-Sigma, a transformer with one T5. See docs/families.md."""

from mmrl.pipelines.diffusion import loading
from mmrl.pipelines.diffusion.noise_prediction import NoisePredictionAdapter


class PixArtSigmaAdapter(NoisePredictionAdapter):
    family = "PixArt-Sigma"
    pipeline = "PixArtSigmaPipeline"
    encoders = ("text_encoder",)
    lora_targets = ("to_k", "to_q", "to_v", "to_out.0")
    spacing = "trailing"  # the published checkpoint says linspace, which DDIM cannot take

    def encode(self, text):
        embeds, mask, *_ = self.pipe.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            device=self.text_encoders[0].device,
            max_sequence_length=self.sampling.max_sequence_length,
        )
        return {"embeds": embeds[0].to(self.device), "mask": mask[0].to(self.device)}

    def latent_shape(self, height, width):
        config, factor = self.pipe.transformer.config, self.pipe.vae_scale_factor
        self._fits(height, width, max(8, factor * config.patch_size))  # the stock pipeline wants a multiple of 8
        return (config.in_channels, height // factor, width // factor)

    def denoise(self, model, z, timestep, features):
        out = model(
            z,
            encoder_hidden_states=features["embeds"],
            encoder_attention_mask=features["mask"],
            timestep=timestep,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
        return out[:, : z.shape[1]]  # the noise; a variance may follow it

    def call(self):
        length = self.sampling.max_sequence_length
        stock = {"use_resolution_binning": False, "clean_caption": False, "max_sequence_length": length}
        return super().call() | stock


build, describe = loading.entry_points(PixArtSigmaAdapter)
